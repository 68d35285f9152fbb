"""The demo's data set. The demo itself takes minutes and is no test: `make demo`."""

import runpy
import sys
from pathlib import Path

import demo
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_file_is_what_the_script_writes():
    script = runpy.run_path(str(ROOT / "data" / "make_demo_pairs.py"))
    assert script["PATH"].read_bytes() == script["to_jsonl"](script["make_pairs"]()).encode()


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
