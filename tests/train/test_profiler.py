"""Profiler: the trace and the table of a real run."""

import pytest

import train_dpo
from tests.toolbox import on_cpu, pairs


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_the_steps_asked_for_are_in_the_trace_and_in_the_table(tiny_folder, write_rows, tmp_path, capsys):
    data = write_rows("p.jsonl", pairs(16))
    assert train_dpo.main(on_cpu(tiny_folder("llama"), data, tmp_path / "run", profile_steps=[2, 3])) == 0
    folder = tmp_path / "run" / "profile"
    assert '"aten::mm"' in (folder / "trace.json").read_text()
    text = (folder / "profile.txt").read_text()
    assert text.startswith("profile of steps 2 to 3, rank 0:\n")
    assert "aten::mm" in text and text in capsys.readouterr().out
