"""FSDP2 and ZeRO-3, two real processes, stopped once and resumed: losses, reference and model of one process."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from sfm_dpo.run.checkpoint import why_incomplete
from tests.e2e.runs import Place
from tests.e2e.test_resume import shards
from tests.toolbox import logged

FIELDS = {
    "learning_rate": 1e-4,
    "eval_fraction": 0.172,  # 11 pairs: a ragged batch on two ranks; FSDP2 treats forwards without a backward apart
    "eval_strategy": "steps",
    "eval_steps": 4,
    "max_steps": 7,
    "save_steps": 100,
}


def read_metrics(run: Path) -> dict[tuple[int, str], float]:
    """Logged metrics by step, without means over a micro-batch's tokens: ranks share the pairs otherwise."""
    compared = re.compile(r"(eval_)?(loss|logps/.*|rewards/.*)|grad_norm|num_tokens")
    entries = logged(run) + logged(run, "eval_loss")
    return {(e["step"], name): e[name] for e in entries for name in e if compared.fullmatch(name)}


@pytest.mark.grid
@pytest.mark.parametrize("launch", ["cpu_fsdp2", "cpu_zero3"])
def test_stopped_and_resumed_it_is_the_run_of_one_process(place, train_here, tmp_path, launch):
    alone = Place(place.folder, place.model, tmp_path / "alone")
    expected = train_here(f"alone-{launch}", hf_home=alone.hf_home, **FIELDS)
    apart = Place(place.folder, place.model, tmp_path / "apart")
    step = apart.start(launch, 2, launch=launch, **FIELDS).stop_at(2)
    assert 2 <= step < 6, "the stop must leave two steps to profile"
    checkpoint = place.folder / launch / f"checkpoint-{step}"
    assert why_incomplete(checkpoint) is None
    kind = {"cpu_fsdp2": "FSDP2", "cpu_zero3": "ZeRO-3"}[launch]
    assert json.loads((checkpoint / "complete.json").read_text())["launch"] == kind
    names = {path.name for path in checkpoint.iterdir()}
    assert names >= ({"pytorch_model_fsdp_0", "optimizer_0"} if launch == "cpu_fsdp2" else {f"global_step{step}"})

    mine = shards(apart)
    theirs = shards(alone)
    assert len(mine) == len(theirs) > 5
    for path, other in zip(mine, theirs, strict=True):
        assert path.parts[-2:] == other.parts[-2:]  # the cache's key and the shard
        found = load_file(path)
        right = load_file(other)
        assert np.array_equal(found["rows"], right["rows"])
        assert np.allclose(found["logps"], right["logps"], atol=1e-3, rtol=1e-5)

    again = apart.start(launch, 2, launch=launch, **FIELDS, profile_steps=[6, 7]).finish()
    assert f"resuming from {checkpoint}" in again.log
    mine = read_metrics(again.folder)
    theirs = read_metrics(expected.folder)
    assert mine.keys() == theirs.keys() and len(mine) > 60
    for key, value in mine.items():
        assert value == pytest.approx(theirs[key], rel=1e-4, abs=1e-4), key

    model, info = AutoModelForCausalLM.from_pretrained(again.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.architectures == ["Olmo3ForCausalLM"]
    other = AutoModelForCausalLM.from_pretrained(expected.folder).state_dict()
    base = AutoModelForCausalLM.from_pretrained(place.model).state_dict()
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, other[name], atol=2e-6), name
        assert not torch.equal(weight, base[name]), name
    table = (again.folder / "profile" / "profile.txt").read_text()
    assert table.startswith("profile of steps 6 to 7, rank 0:\n") and "aten::" in table and table in again.log
    assert '"aten::mm"' in (again.folder / "profile" / "trace.json").read_text()
