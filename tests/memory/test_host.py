"""The optimizer on the host: its memory, as DeepSpeed allocates it, and the check before anything is loaded."""

import pytest
import torch
from torch.optim import AdamW

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.config.fields import parse_config
from sfm_dpo.memory.host import check_host_memory, host_bytes
from sfm_dpo.model.loading import load_model_config, meta_model
from tests.offload import FILES, make_engine
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("itemsize", [2, 4])
def test_deepspeed_allocates_what_is_planned(process_group, itemsize):
    model = tiny_model("llama", tie_word_embeddings=False)
    engine = make_engine("offload", model, AdamW, bf16=itemsize == 2)
    found = []
    for _ in range(2):
        for _ in range(2):
            engine.backward(engine(torch.arange(8)[None], labels=torch.arange(8)[None]).loss)
            engine.step()
        zero = engine.optimizer
        masters = zero.single_partition_of_fp32_groups
        moments = [value for state in zero.optimizer.state.values() for value in state.values()]
        staging = [*zero.param_buffer_of_bit16_for_cpu_offload_groups, *zero.accumulated_grads_in_cpu.values()]
        tensors = [*masters, *(master.grad for master in masters), *moments, *staging]
        found.append(sum(tensor.nbytes for tensor in tensors) + zero.temp_grad_buffer_for_cpu_offload.nbytes)
    copied = itemsize * model.num_parameters()  # at each save
    assert found[0] == found[1] == pytest.approx(host_bytes(model, model, 1, itemsize) - copied, rel=0.01)


@pytest.mark.parametrize("deepspeed", FILES.values())
def test_a_model_whose_optimizer_is_too_large_for_the_host_is_refused(monkeypatch, deepspeed):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(PROJECT / deepspeed))
    argv = ["--dataset_name=d", "--use_cpu", "--bf16", "--model_name_or_path"]
    shape = str(PROJECT / "bench/shapes/olmo3_32b")
    lora = ["--use_peft", "--lora_target_modules=all-linear"]
    check_host_memory(parse_config([*argv, str(PROJECT / "bench/shapes/olmo2_1b"), *lora], world_size=1))
    config = parse_config([*argv, shape], world_size=1)
    if deepspeed == FILES["zero2"]:
        check_host_memory(config)
        return
    model = meta_model(load_model_config(config))
    needed = f"{host_bytes(model, model, 1, 2) / 2**30:.0f}"
    words = rf"needs {needed} GiB of host memory on each node, but \d+ GiB are available; request more \(sbatch --mem="
    with pytest.raises(UserError, match=f"^LAUNCH=offload: the optimizer {words}"):
        check_host_memory(config)
    check_host_memory(parse_config([*argv, shape, "--preflight_only"], world_size=1))
