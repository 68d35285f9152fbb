"""Host memory and time of the optimizer under LAUNCH=offload, by arithmetic, and the check that the memory is there.

Under ZeRO-2 with the optimizer on the host a rank keeps there, for each weight that it updates: the weight, its
gradient and AdamW's two moments in fp32, and the updated weight in 16 bit on its way to the GPU.
"""

import os

from transformers import PreTrainedModel

from sfm_dpo.common.distributed import gather_values, launch_name
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.process import available_memory
from sfm_dpo.config.fields import Config
from sfm_dpo.model.loading import load_model_config, meta_adapter, meta_model

# Bytes per second, not measured. From pageable memory, about a quarter of what pinned memory reaches over PCIe 4
BUS = 6e9
HOST = 100e9  # a third of a socket's peak, for instance 307 GB/s with eight channels of DDR5-4800


def host_bytes(model: PreTrainedModel, trained: PreTrainedModel, ranks: int, itemsize: int) -> int:
    """Bytes of a rank. `model`: the whole one, which each rank reads at the start and copies at each save; `trained`:
    the model whose parameters are updated, this one or an adapter; `itemsize`: of a weight on the GPU."""
    sizes = [parameter.numel() for parameter in trained.parameters() if parameter.requires_grad]
    by_weight = 18 if itemsize == 2 else 24  # in fp32 DeepSpeed sums the gradients on the host, in another copy
    return by_weight * sum(sizes) // ranks + itemsize * (model.num_parameters() + max(sizes))


def update_seconds(trained: int, ranks: int) -> float:
    """Seconds that an optimizer step of so many trained weights takes on the host of all `ranks`, beside forward and
    backward: gradients come in fp32 and weights go in 16 bit, and the host reads and writes 42 bytes a weight."""
    return trained * (6 / ranks / BUS + 42 / HOST)


def check_host_memory(config: Config) -> None:
    """Raises UserError if a node has less memory than its ranks will need. All ranks must call it."""
    args = config.train
    if launch_name() != "offload" or args.preflight_only:
        return
    model_config = load_model_config(config)
    model = meta_model(model_config)
    trained = meta_adapter(config, model_config) or model
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = on_node * host_bytes(model, trained, args.world_size, 2 if args.bf16 else 4)
    available = min(gather_values(available_memory()))
    if available < needed:
        raise UserError(
            f"LAUNCH=offload: the optimizer needs {needed / 2**30:.0f} GiB of host memory on each node, but "
            f"{available / 2**30:.0f} GiB are available; request more (sbatch --mem={1.1 * needed / 2**30:.0f}G), use "
            "LAUNCH=zero2 on more GPUs, or LoRA (use_peft: true)"
        )
