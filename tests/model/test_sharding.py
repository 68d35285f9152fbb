"""Which layers are checkpointed; DeepSpeed's buckets hold the largest tensor of every shape."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import serialization
from transformers import AutoConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.model.loading import blocks, checkpoint_layers, meta_model
from sfm_dpo.model.sharding import OffloadCallback, fit_buckets, zero_config
from tests.e2e.runs import make_place
from tests.offload import Branches, make_engine, train_engine
from tests.tiny_models import tiny_config, tiny_model
from tests.toolbox import pairs


@pytest.mark.parametrize("count", range(9))
def test_checkpointed_layers_are_spread_evenly_and_the_last_is_not_among_them(count):
    model = meta_model(tiny_config("olmo3", num_hidden_layers=8, layer_types=None))
    model.activation_checkpointing_enable()
    checkpoint_layers(model, count)
    chosen = [index for index, layer in enumerate(blocks(model)) if layer.gradient_checkpointing]
    gaps = {after - before for before, after in zip(chosen, [*chosen[1:], 8], strict=False)}
    assert len(chosen) == count and (7 in chosen) is (count == 8)
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("launch", ["zero2", "zero3", "offload"])
def test_every_shape_fits_in_the_buckets(launch):
    """Otherwise its gradient would be overwritten on a GPU. At any number of ranks: what fits is copied whole."""
    zero = zero_config(launch)
    for config in PROJECT.glob("bench/shapes/*/config.json"):
        assert fit_buckets(zero, meta_model(AutoConfig.from_pretrained(config.parent))) == zero
    for small in (1000, 1e3):
        with pytest.raises(UserError, match=r"reduce_bucket_size 1000.*: .* 16640 elements, .* set it to 16640 or"):
            fit_buckets(zero | {"reduce_bucket_size": small}, tiny_model("llama"))


@pytest.mark.slow
def test_under_fsdp2_the_gradient_of_the_head_is_reduced(tmp_path):
    """TRL's fused head reads its weight outside the forward of the module that FSDP2 gathers it for. One step of SGD
    shows the gradient: on two processes it is that of one process, and not that of half of the pairs."""
    fields = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0, "max_steps": 1}
    fields |= {"weight_decay": 0, "max_grad_norm": 1e9, "per_device_train_batch_size": 1}  # 4 micro-batches a process
    place = make_place(tmp_path, pairs(8), {"llama": {}}, fields)
    half = {"global_batch_size": 4, "train_sampling_strategy": "random"}
    runs = place.run_many("single", {"alone": {}, "half": half}) | place.run_many("cpu_fsdp2 2", {"split": {}})
    before = load_file(place.model / "model.safetensors")["lm_head.weight"]
    gradients = {
        run: before - load_file(folder / "model.safetensors")["lm_head.weight"] for run, folder in runs.items()
    }
    error, other = ((gradients[run] - gradients["alone"]).norm() for run in ("split", "half"))
    assert error < 1e-5 * other and other > 0.1 * gradients["alone"].norm() > 0


def test_steps_with_the_optimizer_on_the_host_are_those_of_zero2(process_group):
    """Also after a gradient that is not finite, and where a layer gets none."""
    nan = float("nan")
    steps = [(True, 1), (False, 1), (True, nan), (False, nan), (False, 1), (True, 1)]

    def end_step(engine):  # which has an attribute `optimizer`, as accelerate's wrapper does
        OffloadCallback().on_step_end(None, None, None, optimizer=engine)

    skipped, weights = train_engine("offload", steps, end_step)
    assert (skipped, weights) == train_engine("zero2", steps)
    assert skipped == [0, 0, 1, 2, 2, 2] and weights[0] == weights[4] != weights[5]


def is_mapped(tensor: torch.Tensor, file: Path) -> bool:
    """Whether the tensor's memory is this file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    ranges = [[int(bound, 16) for bound in line[0].split("-")] for line in lines]
    return any(begin <= tensor.data_ptr() < end for begin, end in ranges)


def test_moments_of_a_resumed_run_are_no_longer_files_when_it_begins(process_group, tmp_path, monkeypatch):
    """A file that is truncated, as a save at the same step does, would otherwise kill the process."""
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)  # of a run in this process
    engine = make_engine("offload", Branches(), torch.optim.AdamW)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16), True))
        engine.step()
    engine.save_checkpoint(str(tmp_path), tag="saved")
    engine = make_engine("offload", Branches(), torch.optim.AdamW)
    with serialization.config.patch("load.mmap", True):
        engine.load_checkpoint(str(tmp_path), tag="saved")
    (file,) = tmp_path.glob("saved/*optim_states.pt")
    (state,) = engine.optimizer.optimizer.state.values()
    before = state["exp_avg"].clone()
    assert is_mapped(state["exp_avg"], file) and before.abs().max() > 0
    OffloadCallback().on_train_begin(None, None, None, optimizer=engine)
    assert not any(is_mapped(tensor, file) for tensor in state.values())
    assert torch.equal(state["exp_avg"], before)
