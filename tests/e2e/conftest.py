"""A folder with a tiny model and pairs, and runs in it that were never interrupted."""

from pathlib import Path

import pytest

import train_dpo
from sfm_dpo.train import reference_cache
from tests.e2e.runs import Place, Run
from tests.toolbox import as_options, logged, pairs, write_jsonl


@pytest.fixture(scope="session")
def place(tmp_path_factory, tiny_folder) -> Place:
    folder = tmp_path_factory.mktemp("runs")
    write_jsonl(folder / "pairs.jsonl", pairs())
    return Place(folder, tiny_folder("olmo3"), folder / "hf")


@pytest.fixture(scope="session")
def uninterrupted(place):
    """A function: processes -> the run that was never stopped, made once."""
    runs: dict[int, Run] = {}

    def make(processes: int) -> Run:
        if processes not in runs:
            runs[processes] = place.start(f"uninterrupted-{processes}", processes).finish()
            assert [e["step"] for e in logged(runs[processes].folder)] == list(range(1, 9))
        return runs[processes]

    return make


@pytest.fixture
def train_here(place, environment, monkeypatch, capsys):
    """A function: a run's name, the exit code it must have, fields -> the run, in this process, with its log.

    It saves the seconds that a process takes to import its packages.
    """
    monkeypatch.setattr("sfm_dpo.jobs.training_run.write_report", lambda run: None)

    def train(name: str, code: int = 0, hf_home: Path = place.hf_home, **fields) -> Run:
        monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(hf_home))
        values = place.values(name, **fields)
        log = place.folder / f"{name}.here.log"
        capsys.readouterr()
        ended = train_dpo.main(as_options(values))
        log.write_text("".join(capsys.readouterr()))
        run = Run(values["output_dir"], log, 0, None)
        assert ended == code, run.log[-4000:]
        return run

    return train
