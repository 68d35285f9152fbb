"""DeepSpeed's own buffers in a real LoRA run under ZeRO-2, against the plan; that smaller buckets change no bit."""

import json

import pytest
import torch
from transformers import AutoConfig

from sfm_dpo.config.fields import parse_config
from sfm_dpo.memory.asked import read_asked
from sfm_dpo.memory.planner import MemoryPlanner
from sfm_dpo.model.sharding import fit_buckets, zero_config
from tests.e2e.runs import make_place
from tests.toolbox import as_options, logged, pairs


@pytest.mark.slow
@pytest.mark.grid
def test_buckets_of_a_lora_run_are_planned_and_as_large_as_its_gradients(tmp_path):
    place = make_place(tmp_path, pairs(16), {"llama": {}}, {"bf16": "true", "use_cpu": "true", "max_steps": 4})
    argv = as_options(place.values("run", use_peft="true", lora_r=8, lora_target_modules="all-linear"))
    calls = [[str(tmp_path / name), argv] for name in ("full", "fitted")]
    place.start_together(calls, 2, by="tests.memory.zero_buffers:train")

    shape = AutoConfig.from_pretrained(place.model)
    config = parse_config(argv)
    planner = MemoryPlanner(
        config, shape, read_asked(config, shape), None, 2, True, True, torch.bfloat16, launch="zero2"
    )
    fitted = fit_buckets(zero_config("zero2"), planner.adapter)
    assert fitted["reduce_bucket_size"] == planner.trained
    for name, zero in (("full", zero_config("zero2")), ("fitted", fitted)):
        found = json.loads((tmp_path / name / "buffers.json").read_text())
        assert found["buckets"] == 2 * 2 * zero["reduce_bucket_size"]  # two, in bf16
        planned = planner.states(zero)
        assert found["buckets"] + found["reduction"] == planned["buffers"] + planned["gradients"], name
    runs = [logged(tmp_path / name) for name in ("full", "fitted")]
    assert runs[0] == runs[1] and runs[0][0]["loss"] != runs[0][-1]["loss"]
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("full", "fitted")]
    assert weights[0] == weights[1]
