"""The GPU check: its order and its table. All of it on two CPU processes: tests/slurm/test_submit.py."""

import json

import pytest
from transformers import AutoConfig

from sfm_dpo.common.files import PROJECT
from sfm_dpo.jobs import gpu_check
from sfm_dpo.jobs.gpu_check import Check, Place, Result, format_checks, run_checks, shrink


def test_a_check_that_crashes_is_a_fail_and_one_without_its_input_is_skipped(tmp_path, monkeypatch):
    place = Place(tmp_path / "check-gpu", [], 2, on_gpu=False)

    def crash(place):
        place.call("crash", "bash", "-c", "echo working; echo 'error: no such thing' >&2; exit 3")

    def measure(place):
        assert [row["result"] for row in json.loads((place.folder / "checks.json").read_text())] == ["FAIL"]
        return Result(None, "12 tokens/s")

    checks = [
        Check("one", crash, "switch one off"),
        Check("two", measure, "-"),
        Check("checkpoint", gpu_check.check_save, "another disk"),
    ]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    rows = run_checks(place)
    assert [row["result"] for row in rows] == ["FAIL", "measured", "skipped"]
    assert rows[0]["found"].startswith("RuntimeError: exit code 3: error: no such thing (")
    text = format_checks(rows)
    assert "one: turn off or change: switch one off" in text and "12 tokens/s" in text
    assert "needs what the check 'memory' measures" in text and "another disk" not in text
    assert not (place.folder / "calibration.json").exists()  # nothing was measured


@pytest.mark.parametrize("name", ["olmo3_7b", "gpt_neox_6.9b", "tulu3_8b"])
def test_the_shape_keeps_its_windows_and_grouped_queries(name):
    shape = AutoConfig.from_pretrained(PROJECT / "bench/shapes" / name)
    heads = getattr(shape, "num_key_value_heads", None)
    grouped = heads is not None and heads < shape.num_attention_heads
    small = shrink(shape, on_gpu=False)
    assert small.num_hidden_layers == 4 and small.hidden_size == 64
    assert not grouped or small.num_key_value_heads == 2
    if name == "olmo3_7b":
        assert set(small.layer_types) == {"sliding_attention", "full_attention"}
