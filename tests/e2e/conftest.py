"""A folder with a tiny model and pairs, and runs in it that were never interrupted."""

import os
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
    """A function: processes and launch -> the run that was never stopped, made once."""
    runs: dict[str, Run] = {}

    def make(processes: int, launch: str = "cpu") -> Run:
        name = f"uninterrupted-{processes}-{launch}"
        if name not in runs and processes == 1:
            with pytest.MonkeyPatch.context() as patch:
                runs[name] = run_here(patch, place.values(name), place.hf_home)
        elif name not in runs:
            runs[name] = place.start(name, processes, launch).finish()
            assert [e["step"] for e in logged(runs[name].folder)] == list(range(1, 9))
        return runs[name]

    return make


def run_here(patch: pytest.MonkeyPatch, values: dict, hf_home: Path, code: int = 0) -> Run:
    """A run in this process, without its log and report: it saves the seconds of importing packages."""
    patch.setattr("sfm_dpo.training_run.write_report", lambda run: None)
    patch.setattr(reference_cache, "HF_CACHE_HOME", str(hf_home))
    assert train_dpo.main(as_options(values)) == code
    return Run(values["output_dir"], Path(os.devnull), 0, None)


@pytest.fixture
def train_here(place, environment, monkeypatch, capsys):
    """A function: a run's name, the exit code it must have, fields -> the run, in this process, with its log."""

    def train(name: str, code: int = 0, hf_home: Path = place.hf_home, **fields) -> Run:
        capsys.readouterr()
        run = run_here(monkeypatch, place.values(name, **fields), hf_home, code)
        run.log_file = place.folder / f"{name}.here.log"
        run.log_file.write_text("".join(capsys.readouterr()))
        return run

    return train
