"""The demo's data set. The demo itself takes minutes and is no test: `make demo`."""

import runpy
from pathlib import Path

from sfm_dpo.config import parse_config
from sfm_dpo.data.preferences import load_pairs

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_file_is_what_the_script_writes():
    script = runpy.run_path(str(ROOT / "data" / "make_demo_pairs.py"))
    assert script["PATH"].read_bytes() == script["to_jsonl"](script["make_pairs"]()).encode()


def test_the_recipe_holds_out_16_questions_that_are_not_trained_on(monkeypatch):
    monkeypatch.chdir(ROOT)
    pairs = load_pairs(parse_config(["--config", "recipes/demo.yaml"]))
    train, held_out = ({row["prompt"][-1]["content"] for row in split} for split in pairs.splits.values())
    assert (len(train), len(held_out)) == (96, 16)
    assert not train & held_out
    assert not pairs.dropped
