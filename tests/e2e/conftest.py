"""A folder with a tiny model and pairs, and runs in it that were never interrupted."""

import json
from pathlib import Path

import pytest

from tests.e2e.runs import Place, Run, pairs


@pytest.fixture(scope="session")
def place(tmp_path_factory, tiny_folder) -> Place:
    folder: Path = tmp_path_factory.mktemp("runs")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    return Place(folder, tiny_folder("olmo3"), folder / "hf")


@pytest.fixture(scope="session")
def uninterrupted(place):
    """A function: processes -> the run that was never stopped, made once."""
    runs: dict[int, Run] = {}

    def make(processes: int) -> Run:
        if processes not in runs:
            runs[processes] = place.start(f"uninterrupted-{processes}", processes).finish()
            assert [e["step"] for e in runs[processes].losses()] == list(range(1, 9))
        return runs[processes]

    return make
