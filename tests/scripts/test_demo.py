"""The demo's data set. The demo itself takes minutes and is no test: `make demo`."""

import runpy
import sys
from pathlib import Path

import demo
import pytest

from sfm_dpo.config.fields import parse_config
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


@pytest.mark.parametrize(("name", "is_deleted"), [("outputs/demo", True), ("outputs/dpo", False)])
def test_the_demo_deletes_an_earlier_demo_and_no_other_run(tmp_path, monkeypatch, environment, name, is_deleted):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "resolved_config.yaml").touch()
    (tmp_path / demo.MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "PROJECT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")  # trains
    assert demo.main(["--output_dir", name]) == 1
    assert (tmp_path / name).is_dir() is not is_deleted
