"""Sharding: which rank holds which weights under ZeRO-2, ZeRO-3 and FSDP2, and what the ranks save; the optimizer on
the host.

ZeRO-3: DeepSpeed splits each tensor while the model is loaded. FSDP2: accelerate splits the model when training
begins, with each decoder block as a unit. Otherwise every rank has all weights.
"""

import dataclasses
import json
from typing import Any

import torch
import yaml
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerCallback
from trl.models import prepare_fsdp

from sfm_dpo.common.distributed import launch_file, launch_name, launched_with
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.model.loading import blocks


# Upstream: deepspeed 0.19, runtime/zero/partition_parameters.py, free_param: replaces a parameter by an empty tensor;
# its full size and shape are only in its attributes ds_numel and ds_shape.
# Canary: test_canary_zero3_parameter
def numel(parameter: torch.nn.Parameter) -> int:
    """Elements of the full tensor; under ZeRO-3 `numel()` is 0."""
    return getattr(parameter, "ds_numel", parameter.numel())


def local_shard(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank holds of a parameter; under ZeRO-3 and FSDP2 a part of it."""
    shard = getattr(parameter, "ds_tensor", parameter)
    return shard.to_local() if isinstance(shard, DTensor) else shard


# Upstream: deepspeed 0.19, runtime/zero/parameter_offload.py, setup_zero_stage3_hooks: keeps each model in a global
# list. Canary: test_canary_zero3_keeps_a_model
def free_weights(model: torch.nn.Module) -> None:
    """Frees what this rank holds of a model under ZeRO-3, which nothing computes with any more."""
    for parameter in model.parameters():
        for tensor in (parameter, local_shard(parameter)):
            tensor.data = tensor.data.new_empty(0)


def shape(parameter: torch.nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


# Upstream: accelerate 1.15, state.py, AcceleratorState.__init__: ignores FSDP on CPU processes without a message and
# trains with DDP. Canary: test_canary_fsdp_on_cpu
def use_fsdp_on_cpu(accelerator: Accelerator) -> None:
    if launched_with() == "fsdp" and accelerator.distributed_type == DistributedType.MULTI_CPU:
        plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)  # as AcceleratorState does on GPUs
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):  # each AcceleratorState() copies from the other
            state.distributed_type = DistributedType.FSDP


# Upstream: accelerate 1.15, utils/dataclasses.py, FullyShardedDataParallelPlugin.set_mixed_precision: FSDP2 casts
# outputs and each layer's inputs to 16 bit, and no setting prevents it. Canary: test_canary_fsdp_outputs
def keep_precision(fsdp_plugin: Any) -> None:
    """Keeps the precision of outputs and layer inputs under FSDP2: rounding log-probs to 16 bit hides what the policy
    learned, and OLMo's RoPE is fp32."""
    if policy := fsdp_plugin.mixed_precision_policy:
        fsdp_plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None, cast_forward_inputs=False)


# Upstream: trl 1.16, models/utils.py, prepare_fsdp: makes the reference one unit, so the whole model is moved to each
# GPU before it is split, and each forward gathers all of it. Canary: test_canary_reference_is_one_unit
def prepare_blocks(model: PreTrainedModel, accelerator: Accelerator) -> PreTrainedModel:
    """Splits a reference for FSDP2, with each decoder block as a unit, as accelerate does with the policy."""
    for module in (*blocks(model), model):
        prepare_fsdp(module, accelerator)
    return model


# DeepSpeed 0.19 (DeepSpeedZeroOptimizer.average_tensor) frees a gradient larger than a bucket while the reduction
# stream still reads it, if the gradient belongs to several ranks' partitions. Its buckets (setup_buckets) are as large
# as reduce_bucket_size, however few weights are trained.
def fit_buckets(zero: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """`zero_optimization` with buckets no larger than all gradients of the model, which may be on the meta device.
    Raises UserError if the largest gradient does not fit in a bucket."""
    size = zero.get("reduce_bucket_size")
    if not isinstance(size, int | float):  # 5e8 is a float in JSON
        return zero
    sizes = [numel(parameter) for parameter in model.parameters() if parameter.requires_grad]
    if size < max(sizes):
        raise UserError(
            f"DeepSpeed configuration: reduce_bucket_size {size}: the model has a tensor of {max(sizes)} elements, "
            f"whose gradient could be overwritten; set it to {max(sizes)} or more"
        )
    return zero | {"reduce_bucket_size": min(int(size), sum(sizes))}


# Upstream: deepspeed 0.19, runtime/zero/stage_1_and_2.py, step: with the optimizer on the host, keeps the fp32 sums of
# gradients that are not finite, so each later step is skipped as well; and updates a parameter that gets no gradient,
# such as an expert without tokens, by its last one. Canary: test_canary_offloaded_gradients
class OffloadCallback(TrainerCallback):
    """Drops what DeepSpeed keeps of a step on the host, and of the files from which a run has resumed."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **kwargs: Any) -> None:
        zero = optimizer.optimizer
        for master in zero.single_partition_of_fp32_groups:
            master.grad.zero_()
        if zero.overflow:
            zero.averaged_gradients.clear()

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **kwargs: Any) -> None:
        """Copies the moments, one tensor at a time: they are mapped files, and the next save may replace these."""
        for moments in optimizer.optimizer.optimizer.state.values():
            for tensor in moments.values():
                tensor.data = tensor.data.clone()


def zero_config(launch: str) -> dict[str, Any]:
    """`zero_optimization` in the DeepSpeed file of one of LAUNCHES; empty for FSDP2."""
    deepspeed = yaml.safe_load((PROJECT / launch_file(launch)).read_text()).get("deepspeed_config")
    if deepspeed is None:
        return {}
    return json.loads((PROJECT / deepspeed["deepspeed_config_file"]).read_text())["zero_optimization"]


def suggest_sharding() -> str:
    """For the end of a remedy: a launch that shards the weights, unless that of this process does."""
    other = {"none": "zero3", "zero2": "zero3 or offload", "offload": "zero3"}.get(launch_name())
    return f", or LAUNCH={other}" if other else ""


def model_bytes(model: PreTrainedModel | PeftModel, is_fsdp: bool = False) -> int:
    """Size of a saved model, or of its adapter, which is in fp32; under FSDP2 the weights are in fp32, too."""
    is_adapter = isinstance(model, PeftModel)
    written = [p for p in model.parameters() if p.requires_grad or not is_adapter]
    return sum(numel(p) * (4 if is_fsdp or is_adapter else p.element_size()) for p in written)


def checkpoint_bytes(model: PreTrainedModel | PeftModel, zero_stage: int, is_fsdp: bool, state: float) -> int:
    """Size of a checkpoint: the model; the optimizer's state, `state` bytes for each trained weight; the ranks' fp32
    weights under ZeRO and FSDP2; under ZeRO-2 all weights a second time, in DeepSpeed's mp_rank_00_model_states.pt."""
    again = model_bytes(model) if zero_stage == 2 else 0
    masters = 4 if zero_stage or is_fsdp else 0
    trained = sum(numel(p) for p in model.parameters() if p.requires_grad)
    return model_bytes(model, is_fsdp) + again + int((masters + state) * trained)
