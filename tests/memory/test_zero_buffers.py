"""DeepSpeed's own buffers in a real LoRA run under ZeRO-2, against the plan; that smaller buckets change no bit."""

import json
import subprocess

import pytest
import torch
from transformers import AutoConfig

from sfm_dpo.common.files import PROJECT
from sfm_dpo.config.fields import parse_config
from sfm_dpo.memory.planner import MemoryPlanner
from sfm_dpo.model.sharding import fit_buckets, zero_config
from tests.e2e.runs import clean_environment, launcher
from tests.toolbox import as_options, logged, pairs, write_jsonl


@pytest.mark.slow
@pytest.mark.grid
def test_buckets_of_a_lora_run_are_planned_and_as_large_as_its_gradients(tiny_folder, tmp_path):
    model = tiny_folder("llama")
    fields = {"model_name_or_path": model, "dataset_name": write_jsonl(tmp_path / "p.jsonl", pairs(16))}
    fields |= {"use_peft": "true", "lora_r": 8, "lora_target_modules": "all-linear", "bf16": "true", "use_cpu": "true"}
    fields |= {"global_batch_size": 8, "per_device_train_batch_size": 2, "max_length": 96, "learning_rate": 1e-3}
    fields |= {"logging_steps": 1, "save_strategy": "no", "preflight": "skip", "guard": "skip", "report_to": "none"}
    fields["max_steps"] = 4
    argv = as_options(fields)
    command = [*launcher(2, "cpu"), str(PROJECT / "tests/memory/zero_buffers.py"), str(tmp_path), *argv]
    env = clean_environment(tmp_path / "hf")
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]

    planner = MemoryPlanner(parse_config(argv), AutoConfig.from_pretrained(model), None, 2, True, True, torch.bfloat16)
    fitted = fit_buckets(zero_config("zero2"), planner.adapter)
    assert fitted["reduce_bucket_size"] == planner.trained
    for name, zero in (("full", zero_config("zero2")), ("fitted", fitted)):
        found = json.loads((tmp_path / name / "buffers.json").read_text())
        assert found["buckets"] == 2 * 2 * zero["reduce_bucket_size"]  # two, in bf16
        planned = planner.states("zero2", zero)
        assert found["buckets"] + found["reduction"] == planned["buffers"] + planned["gradients"], name
    runs = [logged(tmp_path / name) for name in ("full", "fitted")]
    assert runs[0] == runs[1] and runs[0][0]["loss"] != runs[0][-1]["loss"]
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("full", "fitted")]
    assert weights[0] == weights[1]
