"""The demo's data set. The demo itself takes minutes and is no test: `make demo`."""

import importlib.util
from pathlib import Path

import pytest

from sfm_dpo.config import parse_config
from sfm_dpo.data.preferences import load_pairs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "data" / "make_demo_pairs.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_file_is_what_the_script_writes(script):
    assert script.PATH.read_bytes() == script.to_jsonl(script.make_pairs()).encode()
    assert script.make_pairs(1) != script.make_pairs(2)


def test_pairs_have_the_shape_of_dolci_think_and_a_short_chosen_answer(script):
    rows = script.make_pairs()
    for row in rows:
        assert list(row) == ["prompt", "chosen", "rejected"] and isinstance(row["prompt"], str)
        assert [message["role"] for side in ("chosen", "rejected") for message in row[side]] == ["assistant"] * 2
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert chosen.endswith(".") and chosen.count(".") == 1 and len(chosen.split()) <= 20
        assert len(rejected.split()) >= 2.5 * len(chosen.split()) and "{" not in rejected
    assert len({row["prompt"].lower() for row in rows}) == len(rows) == 112
    assert len({row["rejected"][0]["content"] for row in rows}) == len(rows)
    answered = sum(row["chosen"][0]["content"] in row["rejected"][0]["content"] for row in rows)
    assert 0.5 * len(rows) < answered < 0.85 * len(rows)  # some rambling answers hold the short one


def test_the_recipe_holds_out_16_questions_that_are_not_trained_on(monkeypatch):
    monkeypatch.chdir(ROOT)
    pairs = load_pairs(parse_config(["--config", "recipes/demo.yaml"]))
    train, held_out = ({row["prompt"][-1]["content"] for row in split} for split in (pairs.train, pairs.eval))
    assert (len(train), len(held_out)) == (96, 16)
    assert not train & held_out
    assert not pairs.dropped
