"""Damaged files of a run: each counts as absent, with one warning, in every command that reads runs."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import compare_runs, status
from sfm_dpo.common.errors import UserError
from sfm_dpo.report import page
from sfm_dpo.report.model_card import write_model_card
from sfm_dpo.run.files import SCHEMAS, read_file
from sfm_dpo.run.folder import STATUS

TYPES = [None, ["x"], "x", 1e9, {"x": None}, True]
FILES = sorted(name for name in SCHEMAS if name != "complete.json")


def change_each_value(value, others: Iterator, depth: int = 3):
    """Copies of JSON content in which one value, down to a depth, is the next of `others` of another type; of a list
    one of the first 2."""
    yield next(other for other in others if type(other) is not type(value))
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in items:
        for changed in change_each_value(item, others, depth - 1) if depth else ():
            copy = value.copy()
            copy[key] = changed
            yield copy


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They take seconds; a log has only numbers."""
    monkeypatch.setattr(page, "draw_curves", lambda log, folder: [])


def read_everywhere(run: Path, other: Path, capsys) -> None:
    assert status.main([str(run)]) == 0 and page.main([str(run)]) == 0
    assert compare_runs.main([str(run), str(other)]) in (0, 1, 2)
    try:
        write_model_card(run)
    except UserError as error:
        assert "restore" in str(error)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_off_is_absent(run, finished_run, name, capsys):
    path = run / name
    path.write_text((path.read_text() if path.exists() else "{}x")[:-2] + "\0")
    assert read_file(path) == read_file(path) == type(SCHEMAS[name])()
    assert capsys.readouterr().err.count(f"warning: {path}: missing or damaged: ") == 1
    read_everywhere(run, finished_run, capsys)


@pytest.mark.grid
@pytest.mark.parametrize("name", FILES)
def test_no_value_of_another_type_is_a_traceback(run, finished_run, name, capsys):
    """Each value by itself; those that no schema names, absent or all together."""
    path = run / name
    content = page.yaml.safe_load(path.read_text()) if path.exists() else type(SCHEMAS[name])()
    others = itertools.cycle(TYPES)
    free = content.keys() - SCHEMAS[name].keys() if isinstance(content, dict) else ()
    named = {key: value for key, value in content.items() if key not in free} if free else content
    variants = list(change_each_value(named, others))
    variants += [named | {key: next(others) for key in free}] if free else []
    for changed in variants:
        path.write_text(json.dumps(changed))
        try:
            read_everywhere(run, finished_run, capsys)
        except Exception as error:
            raise AssertionError(f"{name}: {str(changed)[:3000]}") from error


def test_the_warning_names_the_value(tmp_path, capsys):
    (tmp_path / STATUS).write_text('{"state": "done", "best": {"step": "x", "metric": "m", "value": 1}}')
    assert read_file(tmp_path / STATUS) == {}
    assert "status.json: missing or damaged: ValueError: wrong type of step" in capsys.readouterr().err
