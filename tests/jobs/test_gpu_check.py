"""The GPU check: its arithmetic and its table. The whole of it on two CPU processes: tests/slurm/test_check_gpu.py."""

import json

import pytest
from transformers import AutoConfig

from sfm_dpo.common.files import PROJECT
from sfm_dpo.jobs import gpu_check
from sfm_dpo.jobs.gpu_check import Check, Place, Result, format_checks, measure_attention, run_checks, shrink


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path / "check-gpu", [], 2, on_gpu=False)


def test_a_check_that_crashes_is_a_fail_with_its_last_line_and_the_others_go_on(place, monkeypatch):
    def crash(place):
        place.call("crash", "bash", "-c", "echo working; echo 'error: no such thing' >&2; exit 3")

    checks = [
        Check("one", crash, "switch one off"),
        Check("two", lambda place: Result(None, "12 tokens/s"), "-"),
        Check("three", lambda place: Result(place.facts["absent"], ""), "switch three off"),
    ]
    monkeypatch.setattr(gpu_check, "CHECKS", checks)
    rows = run_checks(place)
    assert [row["result"] for row in rows] == ["FAIL", "figure", "FAIL"]
    assert rows[0]["figure"].startswith("RuntimeError: exit code 3: error: no such thing (")
    assert rows[2]["figure"] == "KeyError: 'absent'"
    text = format_checks(rows)
    assert "turn off or change: switch one off" in text and "12 tokens/s" in text
    assert "switch three off" in (place.folder / "report.html").read_text()
    assert not (place.folder / "calibration.json").exists()  # nothing was measured


@pytest.mark.parametrize("name", ["olmo3_7b", "gpt_neox_6.9b", "tulu3_8b", "olmo2_13b"])
def test_the_shape_keeps_what_is_special_about_it(name):
    shape = AutoConfig.from_pretrained(PROJECT / "bench/shapes" / name)
    heads = getattr(shape, "num_key_value_heads", None)
    grouped = heads is not None and heads < shape.num_attention_heads
    small = shrink(shape, on_gpu=False)
    assert small.num_hidden_layers == 4 and small.hidden_size == 64
    assert not grouped or small.num_key_value_heads == 2
    if name == "olmo3_7b":
        assert set(small.layer_types) == {"sliding_attention", "full_attention"}


def test_a_wrong_window_is_an_error_that_attention_does_not_pass(place, monkeypatch):
    from sfm_dpo.model import attention

    place.folder.mkdir()
    (place.folder / "model").mkdir()
    shrink(AutoConfig.from_pretrained(PROJECT / "bench/shapes/olmo3_7b"), False).save_pretrained(place.model)
    measure_attention(place.folder)
    rows = json.loads((place.folder / "attention.json").read_text())
    assert [row["case"] for row in rows] == ["full", "window", "grouped"]
    assert max(row["error"] for row in rows) < gpu_check.ATTENTION_TOLERANCE

    right = attention._sdpa_by_sequence
    wrong = lambda *args: right(*args[:6], args[6] and args[6] + 1)  # noqa: E731
    monkeypatch.setattr(attention, "_sdpa_by_sequence", wrong)
    measure_attention(place.folder)
    rows = {row["case"]: row["error"] for row in json.loads((place.folder / "attention.json").read_text())}
    assert rows["window"] > gpu_check.ATTENTION_TOLERANCE > rows["full"]
