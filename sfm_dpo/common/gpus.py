"""GPUs: their memory, and why torch does not see those that a node should have."""

import os
from pathlib import Path

import torch

# Bytes of memory, from the vendors' data sheets.
GPU_MEMORY = {"B300": 288e9, "B200": 180e9, "H200": 141e9, "H100": 80e9, "A100": 80e9, "L40S": 48e9}
DRIVER = Path("/proc/driver/nvidia/version")  # exists where NVIDIA's driver is loaded


def explain_missing_gpus() -> str | None:
    """Why torch sees no GPU where there should be one; None where nothing is wrong."""
    given = os.environ.get("SLURM_GPUS_ON_NODE")
    is_cpu_meant = os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if is_cpu_meant or torch.cuda.is_available() or not (given or DRIVER.exists()):
        return None
    reason = "no reason given"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: a build of torch without CUDA
        reason = str(error).rstrip(".")
    what = f"Slurm gave {given} GPU(s) that torch does not see" if given else "torch does not see the GPU of this node"
    return f"{what} ({reason}); ask for another node (--exclude), or check the driver and torch's CUDA"
