"""environment.json: git commit, versions, hardware, Slurm ids and the command line of a start."""

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sfm_dpo.common.distributed import world_size
from sfm_dpo.common.secrets import mask

_PACKAGES = "torch transformers trl accelerate deepspeed datasets peft huggingface_hub tokenizers numpy".split()
_SLURM = "SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST SLURM_JOB_PARTITION SLURM_CLUSTER_NAME SLURM_RESTART_COUNT"


def environment() -> dict[str, Any]:
    """The content of environment.json."""
    import torch

    return {
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "command": [mask(arg) for arg in (Path(sys.executable).name, *sys.argv)],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "world_size": world_size(),
        "slurm": {key: os.environ[key] for key in _SLURM.split() if key in os.environ},
    }


def _git(*command: str) -> str | None:
    if shutil.which("git") is None:
        return None
    root = Path(__file__).parent
    result = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None
