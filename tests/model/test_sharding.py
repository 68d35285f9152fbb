"""Which layers are checkpointed; DeepSpeed's buckets hold the largest tensor of every shape."""

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.model.loading import blocks, checkpoint_layers, meta_model
from sfm_dpo.model.sharding import fit_buckets, zero_config
from tests.e2e.runs import make_place
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


@pytest.mark.parametrize("launch", ["zero2", "zero3"])
def test_every_shape_fits_in_the_buckets(launch):
    """Otherwise its gradient would be overwritten on a GPU. At any number of ranks: what fits is copied whole."""
    zero = zero_config(launch)
    for config in PROJECT.glob("bench/shapes/*/config.json"):
        assert fit_buckets(zero, meta_model(AutoConfig.from_pretrained(config.parent))) == zero
    with pytest.raises(UserError, match=r"reduce_bucket_size 1000: .* 16640 elements, .* set it to 16640 or more"):
        fit_buckets(zero | {"reduce_bucket_size": 1000}, tiny_model("llama"))


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
