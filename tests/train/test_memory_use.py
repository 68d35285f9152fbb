"""The optimizer's state before the first step changes nothing; an out-of-memory error, under a real limit."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo3Config

from sfm_dpo.common.files import PROJECT
from sfm_dpo.train.callbacks import Position, allocate_optimizer_state
from sfm_dpo.train.fit_memory import explain_out_of_memory
from tests.model.test_memory import SHAPE
from tests.tiny_models import tiny_tokenizer
from tests.toolbox import error_line


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_allocated_before_the_first_update_changes_no_bit(options, dtype):
    results = []
    for ahead in (False, True):
        torch.manual_seed(0)
        weights = [torch.randn(7, 3, dtype=dtype).requires_grad_() for _ in range(3)]
        weights[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1, **options)
        if ahead:
            allocate_optimizer_state(optimizer)
            assert set(optimizer.state) == {weights[0], weights[2]}
            assert all(not value.any() for state in optimizer.state.values() for value in state.values())
        for step in range(3):
            for weight in (weights[0], weights[2]):
                weight.grad = torch.randn(7, 3, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.step()
        results.append([*weights, *(value for state in optimizer.state.values() for value in state.values())])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(lazy, ahead) for lazy, ahead in zip(*results, strict=True))


CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.02 GiB is"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError(CUDA), "step 8 (CUDA out of memory. Tried to allocate 2.50 GiB."),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "; use a smaller",
        ),
        (MemoryError(), "out of memory in training, step 8 (MemoryError); use a smaller per_device_train_batch_size"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
    ids=["CUDA", "cuBLAS", "Python", "another"],
)
def test_errors_that_are_out_of_memory(error, line, tmp_path):
    position = Position()
    position.begin_micro_batch("training", 7, {})
    end = explain_out_of_memory(error, position, tmp_path)
    assert (end is None) == (line is None)
    if end:
        assert (end.exit_code, end.state) == (2, "failed") and line in str(end)


LIMITED = """
import resource, sys
import psutil, train_dpo

resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + int(sys.argv[1]),) * 2)
sys.exit(train_dpo.main(sys.argv[2:]))
"""


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_a_micro_batch_that_does_not_fit_ends_at_step_1_with_a_line_that_names_a_smaller_setting(tmp_path, write_rows):
    AutoModelForCausalLM.from_config(Olmo3Config(**SHAPE)).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = [60] * 8 + [2] * 24
    rows = [{"prompt": f"{i}?", "chosen": "yes " * n, "rejected": "no, " * n} for i, n in enumerate(words)]
    fields = ["--dataset_name", write_rows("p.jsonl", rows), "--model_name_or_path", tmp_path / "model", "--use_cpu"]
    fields += "--global_batch_size 8 --max_length 192 --padding_free true --preflight skip --guard skip".split()
    fields += "--save_strategy no --precompute_ref_log_probs true --precompute_ref_batch_size 1 --max_steps 2".split()
    fields += "--train_sampling_strategy group_by_length --fit_memory true".split()
    env = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}

    def train(name: str, *more: str) -> tuple[int, str, dict]:
        command = [sys.executable, "-c", LIMITED, int(1.6 * 2**30), *fields, "--output_dir", tmp_path / name, *more]
        command = [str(part) for part in command]
        done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=280)
        return done.returncode, done.stdout + done.stderr, json.loads((tmp_path / name / "status.json").read_text())

    code, log, status = train("fitted", "--memory_gib", "1000")
    assert (code, status["state"], status["step"]) == (2, "failed", 0), log[-3000:]
    line = error_line(log)
    assert re.search(r"out of memory in training, step 1, micro-batch of 8 pairs, [\d,]+ tokens", line), line
    smaller = re.search(r"; the next smaller setting of fit_memory: (--per_device.*)", line)[1]
    train("smaller", "--memory_gib", "1000", *shlex.split(smaller))
    first, second = (
        json.loads((tmp_path / name / "data.json").read_text())["fit_memory"] for name in ("fitted", "smaller")
    )
    assert first["per_device"] == 8 and second["bytes"] < first["bytes"]
    code, log, status = train("smallest", "--per_device_train_batch_size", "1", "--gradient_checkpointing", "true")
    assert (code, status["state"], status["step"]) == (0, "done", 2), log[-3000:]
