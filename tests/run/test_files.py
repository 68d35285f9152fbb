"""Damaged files of a run: each counts as absent, with one warning, in every command that reads runs."""

import json
from pathlib import Path

import pytest

from scripts import compare_runs, status
from sfm_dpo.report import page
from sfm_dpo.run.folder import RUN_FILES, TRAINER_STATE, read_file
from sfm_dpo.training_run import report

pytestmark = pytest.mark.usefixtures("without_curves")


def read_everywhere(run: Path, other: Path, capsys) -> list[int]:
    codes = [status.main([str(run)]), compare_runs.main([str(run), str(other)])]
    report(run)  # says in one line why it cannot be written
    assert "Traceback" not in capsys.readouterr().err
    return codes


@pytest.mark.parametrize("name", [*RUN_FILES, TRAINER_STATE])
@pytest.mark.parametrize(("damage", "reason"), [("cut off", "Error"), ("a number", "ValueError: holds a int, not a ")])
def test_a_damaged_file_is_absent(run, finished_run, name, damage, reason, capsys):
    path = run / name
    path.write_text("1" if damage == "a number" else '{"a": [\0')
    assert not read_file(path) and read_file(path) == read_file(run / "absent" / name)
    err = capsys.readouterr().err
    assert err.count(f"warning: {path}: missing or damaged: ") == 1 and reason in err
    codes = read_everywhere(run, finished_run, capsys)
    assert codes[0] == 0 and codes[1] in (0, 1, 2)


@pytest.mark.parametrize("name", [*RUN_FILES, TRAINER_STATE])
def test_values_of_another_type_end_no_command_with_a_traceback(run, finished_run, name, capsys):
    path = run / name
    content = page.yaml.safe_load(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(dict.fromkeys(content, 1e9) if isinstance(content, dict) else [1e9]))
    assert set(read_everywhere(run, finished_run, capsys)) <= {0, 1, 2}
