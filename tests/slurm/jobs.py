"""Jobs on the local Slurm: their environment, their fields, their ends and logs."""

import contextlib
import shutil
import sys
from pathlib import Path

from sfm_dpo.config.fields import parse_config
from sfm_dpo.run.folder import describe
from tests.slurm.cluster import Cluster
from tests.toolbox import as_options

CPU = {"LAUNCH": "cpu", "VENV": sys.prefix, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
CPU |= {"SKIP_HEALTHCHECK": "1"}  # seconds a start; the tests of it leave it on


def train(cluster: Cluster, folder: Path, *options: str, env: dict[str, str] | None = None, **fields) -> str:
    """Submits scripts/dpo_train.sh with sbatch's options and the run's fields; returns the job's id."""
    command = [*options, "scripts/dpo_train.sh", *as_options(fields)]
    return cluster.sbatch(*command, cwd=folder, **CPU | (env or {}))


def end_of(cluster, folder: Path, job: str, state="COMPLETED", code="0:0", restarts=0, name="dpo-train") -> str:
    """Waits for a job that must end so; returns its log."""
    record = cluster.wait(job, 1800)
    log = log_of(folder, record["JobId"], name)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == (state, code, str(restarts)), log[-3000:]
    return log


def stand_in(project: Path, folder: Path, script: str, *runs: dict) -> Path:
    """The project with a train_dpo.py that only ends as a run may end, and the folders of runs that have begun."""
    copy = folder / "project"
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("outputs", "logs"))
    (copy / "train_dpo.py").write_text(script)
    (copy / "logs").mkdir()
    with contextlib.chdir(copy):
        for fields in runs:
            describe(parse_config(["--config", "recipes/think.yaml", *as_options(fields)]))
    return copy


def log_of(project: Path, job: str, name: str = "dpo-train") -> str:
    return (project / f"logs/{name}-{job}.out").read_text()
