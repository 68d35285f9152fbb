"""Parity: correct code paths differ by rounding; a bug injected into the real path is told from it."""

import json
import re

import pytest
import torch

from scripts import parity as command
from sfm_dpo.compare.parity import MAX_TIMES_ROUNDING, compare_gradients, run_parity
from sfm_dpo.model import attention, packing
from sfm_dpo.train import reference_cache
from tests.toolbox import error_line, pairs, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.grid]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, tiny_folder):
    """A function: architecture -> the arguments that stand for a recipe."""
    path = write_jsonl(tmp_path_factory.mktemp("parity") / "pairs.jsonl", pairs(16))

    def argv(architecture: str) -> list[str]:
        fields = f"--model_name_or_path {tiny_folder(architecture)} --dataset_name {path} --dataset_num_proc 1"
        return f"{fields} --max_length 96 --learning_rate 1e-4 --use_cpu".split()

    return argv


@pytest.mark.parametrize("architecture", ["gpt_neox", "olmo3"])
def test_correct_paths_are_rounding(recipe, architecture):
    names = "padded packed shared batch_1 packed+batch_1 bf16 packed+bf16".split()
    result = run_parity(recipe(architecture), names, pairs=4)
    for row in result["variants"]:
        assert row["verdict"] == "rounding", row
        assert row["times_rounding"] < MAX_TIMES_ROUNDING / 2, row  # no threshold that is met by luck
    assert result["variants"][0]["times_rounding"] == 0, "the reference differs from itself"
    # Rounding scales with the precision: 2^16 between them
    ratio = result["levels"]["bfloat16"]["logp_mean"] / result["levels"]["float32"]["logp_mean"]
    assert 2**16 / 16 < ratio < 2**16 * 16


boundary_arguments = attention.boundary_arguments


def leaking(cu_seqlens, max_length):
    total = int(cu_seqlens[-1])
    return boundary_arguments(torch.tensor([0, total], dtype=torch.int32), total)


def off_by_one(cu_seqlens, max_length):
    moved = cu_seqlens.clone()
    moved[1:-1] += 1  # each sequence's first token belongs to the one before
    return boundary_arguments(moved, max_length + 1)


@pytest.mark.parametrize(("architecture", "bug"), [("olmo3", leaking), ("gpt_neox", off_by_one)])
def test_injected_boundaries(recipe, monkeypatch, architecture, bug):
    monkeypatch.setattr(packing, "boundary_arguments", bug)
    for row in run_parity(recipe(architecture), ["padded", "packed", "padded+bf16", "packed+bf16"])["variants"]:
        if row["variant"].startswith("packed"):
            assert row["verdict"] == "bug" and row["times_rounding"] > 2 * MAX_TIMES_ROUNDING, row
        else:
            assert row["verdict"] == "rounding"


@pytest.mark.parametrize("scaling", [float("nan"), 0.2])
def test_injected_attention(recipe, tmp_path, monkeypatch, scaling):
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path))
    forward = attention.packed_attention_forward
    patched = {"scaling": scaling}
    monkeypatch.setattr(attention, "packed_attention_forward", lambda *args, **kw: forward(*args, **(kw | patched)))
    for row in run_parity(recipe("llama"), ["packed", "packed+bf16"], pairs=2)["variants"][1:]:
        assert row["verdict"] == "bug"
    assert not any(tmp_path.iterdir())  # what a bug computes never reaches a cache of reference log-probs


def test_compare_gradients_by_layer():
    layer_0 = "model.layers.0.w"
    layer_1 = "model.layers.1.w"
    a = {layer_0: torch.tensor([3.0, 4.0]), layer_1: torch.tensor([1.0]), "lm_head.weight": torch.ones(2)}
    b = a | {layer_0: torch.tensor([4.0, 3.0]), "lm_head.weight": -torch.ones(2)}
    assert compare_gradients(a, b) == {"layer 0": pytest.approx(2**0.5 / 5), "layer 1": 0, "lm_head": 2}


def test_command(recipe, tmp_path, capsys, monkeypatch):
    file = tmp_path / "parity.json"
    argv = [*recipe("llama"), "--pairs", "2", "--variants", "packed", "--json", str(file)]
    assert command.main(argv) == 0
    out = capsys.readouterr().out.rstrip()
    begun = re.findall(r"^[\d:]+ computing (.*)$", out, re.MULTILINE)
    assert begun == ["eager", "eager, weights moved by a bit", "packed"]
    assert out.endswith("rounding")
    packed = json.loads(file.read_text())["variants"][1]
    assert {"layer 0", "layer 1", "layer 2", "lm_head"} <= set(packed["layers"])
    monkeypatch.setattr(packing, "boundary_arguments", leaking)
    assert command.main(argv) == 1
    assert command.main([*recipe("llama"), "--variants", "pakced"]) == 2
    assert "unknown word 'pakced'" in error_line(capsys.readouterr().err)


def test_an_sft_term_is_the_same_whatever_the_batch(recipe):
    rows = run_parity([*recipe("llama"), "--loss_type", "sigmoid_norm", "sft"], ["batch_1"], pairs=3)["variants"]
    assert [row["verdict"] for row in rows] == ["rounding", "rounding"]
