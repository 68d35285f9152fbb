"""FSDP2 and ZeRO-3 with two real processes: the losses, the reference and the model of one process with whole weights.

Each launcher's run is stopped once and goes on, so that what is compared at the end has been through a checkpoint.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from sfm_dpo.run.checkpoint import STOP, why_incomplete
from tests.e2e.runs import Place, Run

FIELDS = {
    "learning_rate": 1e-4,
    "eval_fraction": 0.172,  # 11 pairs: a ragged batch on two ranks; FSDP2 treats forwards without a backward apart
    "eval_strategy": "steps",
    "eval_steps": 4,
    "max_steps": 7,
    "save_steps": 100,
    "profile_steps": None,
}
RANKS = 2


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory) -> tuple[Run, Place]:
    """The same run in one process, with a cache of its own."""
    apart = Place(place.folder, place.model, tmp_path_factory.mktemp("hf"))
    return apart.start("whole", **FIELDS).finish(), apart


def shards(place: Place) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """By folder, whose name is the cache's key, and file."""
    return {
        (p.parent.name, p.name): load_file(p) for p in sorted(place.hf_home.glob("sfm_dpo/reference/*/*.safetensors"))
    }


def figures(run: Run) -> dict[tuple[int, str], float]:
    """Every logged metric that is about neither time nor memory."""
    history = json.loads((run.folder / "trainer_state.json").read_text())["log_history"]
    return {
        (entry["step"], name): value
        for entry in history
        for name, value in entry.items()
        if (name != "train_loss" and "loss" in name)  # that one is the mean since the last start
        or "logps/" in name
        or "rewards/" in name
        or name in ("grad_norm", "num_tokens")
    }


@pytest.mark.parametrize("launch", ["cpu_fsdp2", pytest.param("cpu_zero3", marks=pytest.mark.grid)])
def test_same_run_stopped_and_resumed_and_saved_whole(place, whole, tmp_path, launch):
    expected, expected_place = whole
    apart = Place(place.folder, place.model, tmp_path)
    run = apart.start(launch, RANKS, launch=launch, **FIELDS)
    assert run.until_step(2)
    (run.folder / STOP).touch()
    assert run.wait() == 0, run.log[-4000:]
    assert run.status["state"] == "stopped", run.status
    step = run.status["step"]
    assert 2 <= step < 6, "the stop must leave two steps to profile"
    checkpoint = run.folder / f"checkpoint-{step}"
    assert why_incomplete(checkpoint) is None
    kind = {"cpu_fsdp2": "FSDP2", "cpu_zero3": "ZeRO-3"}[launch]
    assert json.loads((checkpoint / "complete.json").read_text())["launch"] == kind
    names = {path.name for path in checkpoint.iterdir()}
    assert names >= ({"pytorch_model_fsdp_0", "optimizer_0"} if launch == "cpu_fsdp2" else {f"global_step{step}"})

    mine, theirs = shards(apart), shards(expected_place)
    assert mine.keys() == theirs.keys() and len(mine) > 20
    for name in mine:
        assert np.array_equal(mine[name]["rows"], theirs[name]["rows"])
        assert np.allclose(mine[name]["logps"], theirs[name]["logps"], atol=1e-3, rtol=1e-5)

    again = apart.start(launch, RANKS, launch=launch, **FIELDS | {"profile_steps": [6, 7]}).finish()
    assert f"resuming from {checkpoint}" in again.log
    mine, theirs = figures(again), figures(expected)
    assert mine.keys() == theirs.keys() and len(mine) > 60
    for key, value in mine.items():
        assert value == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key

    model, info = AutoModelForCausalLM.from_pretrained(again.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.architectures == ["Olmo3ForCausalLM"]
    other, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (expected.folder, place.model))
    for (name, parameter), whole_one, first in zip(
        model.named_parameters(), other.parameters(), base.parameters(), strict=True
    ):
        assert torch.allclose(parameter, whole_one, atol=2e-6), name
        assert not torch.equal(parameter, first), name

    profile = json.loads((again.folder / "profile" / "profile.json").read_text())
    assert sum(profile["shares"].values()) == pytest.approx(1)
    assert profile["shares"]["communication"] > 0.02
