"""Jobs on the local Slurm: their environment, their fields, their logs."""

import sys
import time
from pathlib import Path

CPU = {"LAUNCH": "cpu", "VENV": sys.prefix, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
CPU |= {"SKIP_HEALTHCHECK": "1"}  # seconds a start; the tests of it leave it on


def overrides(**fields) -> list[str]:
    return [arg for key, value in fields.items() for arg in (f"--{key}", str(value))]


def log_of(project: Path, job: str, name: str = "dpo-train") -> str:
    return (project / f"logs/{name}-{job}.out").read_text()


def wait_for(condition, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
