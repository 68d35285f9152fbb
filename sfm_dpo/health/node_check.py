"""Node check: GPUs, disks and an all-reduce across all ranks, in seconds, before a job trains for hours.

    python -m sfm_dpo.health.node_check --output_dir outputs/dpo                                  one process
    torchrun --nproc-per-node 4 -m sfm_dpo.health.node_check --output_dir outputs/dpo             a node with 4 GPUs

The batch scripts run it on all nodes. Each rank checks its own device; the first of a node also the disks, and what
nvidia-smi said before the ranks began. Rank 0 prints the findings of all ranks and the --exclude that leaves the bad
nodes out. Exit code 69 (EX_UNAVAILABLE) if anything is wrong. It imports torch alone, to be fast.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sfm_dpo
from sfm_dpo.common.distributed import is_main_process
from sfm_dpo.common.files import format_size
from sfm_dpo.common.gpus import explain_missing_gpus

log = logging.getLogger("sfm_dpo.health.node_check")  # __name__ is __main__

UNHEALTHY = 69
JOIN_SECONDS = 120  # a rank that has not joined by then is lost: importing torch from a cold disk takes long
REDUCE_SECONDS = 45
MIN_FREE_GIB = 2.0  # logs, caches and reports; checkpoints are checked against their size when the model is known
MAX_USED_MIB = 2048  # of GPU memory before the run starts: above it another process is there

HOST = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sfm_dpo.health.node_check", description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    folders = list_folders(parser.parse_args(argv).output_dir)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # started without a launcher
    findings = check_matmul()
    if LOCAL_RANK == 0:
        findings += check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        for name, folder in folders.items():
            findings += check_folder(name, folder)
    alone = False
    try:
        reports = gather_findings(findings, folders)
    except Exception as error:  # torch has no narrower one
        alone = True
        reason = " ".join(str(error).split())[:300]
        reports = [(HOST, [*findings, f"rank {RANK} could not reach the other ranks: {reason}"])]
    if LOCAL_RANK == 0:
        for folder in folders.values():
            with suppress(OSError):
                mark_of(HOST, folder).unlink()
    bad = sorted({host for host, lines in reports if lines})
    if is_main_process() or alone:
        for host, lines in reports:
            for line in lines:
                log.error(f"unhealthy {host}: {line}")
        if bad:
            log.error(f"submit again with --exclude={','.join(bad)}, or SKIP_HEALTHCHECK=1 to train anyway")
        else:
            log.info(f"health: {len({host for host, _ in reports})} node(s), {len(reports)} rank(s) fine")
    return UNHEALTHY if bad else 0


def check_gpus(processes: int) -> list[str]:
    """What is wrong with the node's GPUs as a whole; nothing where the run is on CPU."""
    if not on_gpu():
        return []
    if torch.cuda.device_count() < processes:
        return [f"{torch.cuda.device_count()} GPU(s) for {processes} processes: {explain_missing_gpus() or 'too few'}"]
    before = os.environ.get("SMI_BEFORE_RANKS")  # set by the batch script; empty where nvidia-smi failed
    if before == "":
        return ["nvidia-smi fails"]
    return read_smi(before or "")


def read_smi(text: str) -> list[str]:
    """Findings in nvidia-smi's lines "index, used MiB, uncorrected ECC errors"; [N/A] where a GPU has no ECC."""
    findings = []
    for line in text.strip().splitlines():
        index, used, errors = (part.strip() for part in line.split(","))
        if used.isdigit() and int(used) > MAX_USED_MIB:
            findings.append(f"GPU {index} has {int(used):,} MiB in use before the run")
        if errors.isdigit() and int(errors):
            findings.append(f"GPU {index} has {errors} uncorrected ECC errors")
    return findings


def check_matmul() -> list[str]:
    """Multiplies matrices of known product on this rank's device."""
    if on_gpu() and not torch.cuda.is_available():
        return []  # a finding of check_gpus
    where = f"GPU {LOCAL_RANK}" if on_gpu() else "CPU"
    size = 8192 if on_gpu() else 512
    try:
        twos = torch.full((size, size), 2.0, dtype=torch.bfloat16, device=select_device())
        wrong = int((twos @ twos != 4.0 * size).sum())  # a power of two: exact in bfloat16
    except RuntimeError as error:
        return [f"{where}: a matmul failed: {str(error).splitlines()[0]}"]
    return [f"{where}: {wrong:,} wrong values in a matmul"] if wrong else []


def list_folders(output_dir: str) -> dict[str, Path]:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return {"output_dir": Path(output_dir), "HF_HOME": Path(home).expanduser(), "TMPDIR": Path(tempfile.gettempdir())}


def check_folder(name: str, folder: Path) -> list[str]:
    """Whether a folder can be written, and has room. This node's mark stays in it until the check ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with mark_of(HOST, folder).open("wb", buffering=0) as file:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
    except OSError as error:
        return [f"{name} {folder} cannot be written: {error.strerror}"]
    free = shutil.disk_usage(folder).free
    low = f"{name} {folder} has {format_size(free)} free, {MIN_FREE_GIB:g} GiB are needed"
    return [low] if free < MIN_FREE_GIB * 2**30 else []


def mark_of(host: str, folder: Path) -> Path:
    return folder / f".health-{host}-{os.environ['MASTER_PORT']}"


def gather_findings(findings: list[str], folders: dict[str, Path]) -> list[tuple[str, list[str]]]:
    """All ranks' (host, findings), after checking that the nodes share their folders, and an all-reduce."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN_SECONDS))
    first, known = gather_reports(findings)[0]
    if LOCAL_RANK == 0:
        for name in ("output_dir", "HF_HOME"):
            unmarked = any(line.startswith(name) for line in known)  # the first node could not write it either
            if not unmarked and not mark_of(first, folders[name]).exists():
                findings.append(f"{name} {folders[name]} is not the first node's: all nodes must share the folder")
    reports = gather_reports(findings)
    if not any(lines for _, lines in reports):  # a device that failed would leave the other ranks waiting here
        reports = gather_reports(check_all_reduce())
    dist.destroy_process_group()
    return reports


def gather_reports(findings: list[str]) -> list[tuple[str, list[str]]]:
    """All ranks' (host, findings)."""
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (HOST, findings))
    return reports


def check_all_reduce() -> list[str]:
    """Adds up numbers over all ranks on their devices: NCCL between GPUs, gloo otherwise."""
    ranks = dist.get_world_size()
    group = dist.new_group(backend="nccl" if on_gpu() else "gloo", timeout=timedelta(seconds=REDUCE_SECONDS))
    numbers = torch.full((1024,), float(RANK + 1), device=select_device())
    dist.all_reduce(numbers, group=group)
    if bool((numbers == ranks * (ranks + 1) / 2).all()):
        return []
    return [f"{numbers.device}: an all-reduce over {ranks} ranks gave {numbers[0].item():g}"]


def on_gpu() -> bool:
    """By what the node should have: a node that has lost its GPUs must not pass as one without."""
    should_have = torch.cuda.is_available() or "SLURM_GPUS_ON_NODE" in os.environ
    return should_have and os.environ.get("DS_ACCELERATOR") != "cpu"


def select_device() -> torch.device:
    if not on_gpu():
        return torch.device("cpu")
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)


if __name__ == "__main__":
    sfm_dpo.setup()
    sys.exit(main(sys.argv[1:]))
