"""Jobs on the local Slurm: their environment, their fields, their logs."""

import contextlib
import shutil
import sys
import time
from pathlib import Path

from sfm_dpo.config import parse_config
from sfm_dpo.run.folder import describe

CPU = {"LAUNCH": "cpu", "VENV": sys.prefix, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
CPU |= {"SKIP_HEALTHCHECK": "1"}  # seconds a start; the tests of it leave it on


def overrides(**fields) -> list[str]:
    return [arg for key, value in fields.items() for arg in (f"--{key}", str(value))]


def stand_in(project: Path, folder: Path, script: str, *runs: dict) -> Path:
    """The project with a train_dpo.py that only ends as a run may end, and the folders of runs that have begun."""
    copy = folder / "project"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("outputs", "logs"))
    (copy / "train_dpo.py").write_text(script)
    (copy / "logs").mkdir()
    with contextlib.chdir(copy):
        for fields in runs:
            describe(parse_config(["--config", "recipes/think.yaml", *overrides(**fields)]), {})
    return copy


def log_of(project: Path, job: str, name: str = "dpo-train") -> str:
    return (project / f"logs/{name}-{job}.out").read_text()


def wait_for(condition, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
