"""GPUs that a node should have and torch does not see: why."""

import os
import re
from pathlib import Path

import torch

# Oldest driver of each CUDA major version on Linux (NVIDIA, CUDA Compatibility, "minor version compatibility").
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def explain_missing_gpus() -> str | None:
    """Why torch sees no GPU where Slurm gave some or a driver is loaded; None where it sees them or none should be."""
    given, driver = os.environ.get("SLURM_GPUS_ON_NODE"), read_driver_version()
    on_purpose = os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if on_purpose or torch.cuda.is_available() or not (given or driver):
        return None
    there = f"Slurm gave {given} GPU(s) that torch does not see" if given else "a GPU driver is there, but no GPU"
    return f"{there}: {explain_driver(driver, torch.version.cuda)}"


def explain_driver(driver: str | None, cuda: str | None) -> str:
    """What keeps torch from a GPU; `cuda`: its version of CUDA, None for a CPU build; `driver`: None for none."""
    if cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install the CUDA build (pip's choice on Linux)"
    if driver is None:
        return "no NVIDIA driver is loaded; ask for another node (--exclude), and tell the cluster's admins"
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
    if int(driver.split(".")[0]) < oldest:
        return (
            f"driver {driver} is too old for torch's CUDA {cuda}, which needs {oldest} or newer; ask for nodes with a "
            "newer driver, or install a torch wheel for an older CUDA"
        )
    return f"driver {driver} is new enough for CUDA {cuda}, so the GPU itself fails; see nvidia-smi on the node"


def read_driver_version(path: Path = _DRIVER_FILE) -> str | None:
    """Version of the loaded NVIDIA driver, or None."""
    try:
        version = re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", path.read_text())
    except OSError:
        return None
    return version[1] if version else None
