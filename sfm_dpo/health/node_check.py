"""Node check: tests GPUs, folders and an all-reduce across all ranks in seconds, before a job trains for hours.

    torchrun --nproc-per-node 4 -m sfm_dpo.health.node_check --output_dir outputs/dpo

The batch scripts run it on all nodes. It imports only torch, to be fast.
"""

import argparse
import ctypes
import logging
import os
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sfm_dpo
from sfm_dpo.common.distributed import explain_missing_gpus, is_main_process

log = logging.getLogger("sfm_dpo.health.node_check")  # __name__ is __main__

UNHEALTHY = 69  # exit code: EX_UNAVAILABLE
JOIN_SECONDS = 300  # time for all ranks to join: importing torch from a cold shared disk is slow
REDUCE_SECONDS = 45

Report = tuple[str, list[str]]  # a rank's host and findings
HOST = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
# What the node should have: a node that has lost its GPUs must not pass as a CPU node
HAS_GPUS = torch.cuda.is_available() or "SLURM_GPUS_ON_NODE" in os.environ
ON_GPU = HAS_GPUS and os.environ.get("DS_ACCELERATOR") != "cpu"
DEVICE = torch.device("cuda", LOCAL_RANK) if ON_GPU else torch.device("cpu")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sfm_dpo.health.node_check", description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # started without a launcher
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    folders = {"output_dir": Path(parser.parse_args(argv).output_dir), "HF_HOME": Path(home).expanduser()}
    if LOCAL_RANK == 0:
        print(f"{HOST}: {describe_network()}", flush=True)
    try:
        reports = check_all(folders)
        is_speaker = is_main_process()
    except Exception as error:  # torch raises no narrower class
        reason = " ".join(str(error).split())[:300]
        reports = [(HOST, [f"rank {RANK} could not reach the other ranks: {reason}"])]
        is_speaker = True
    if is_main_process():
        for folder in folders.values():
            with suppress(OSError):
                mark_of(folder).unlink()
    bad = sorted({host for host, lines in reports if lines})
    if is_speaker:
        for host, lines in reports:
            for line in lines:
                log.error(f"unhealthy {host}: {line}")
        if bad:
            log.error(f"submit again with --exclude={','.join(bad)}, or SKIP_HEALTHCHECK=1 to train anyway")
        else:
            log.info(f"node check: {len({host for host, _ in reports})} node(s), {len(reports)} rank(s) are healthy")
    return UNHEALTHY if bad else 0


def check_all(folders: dict[str, Path]) -> list[Report]:
    """Reports of all ranks up to the first check that fails: a bad device could make the next check hang."""
    findings = check_device()
    if LOCAL_RANK == 0:
        findings += check_writing(folders)
    dist.init_process_group("gloo", timeout=timedelta(seconds=JOIN_SECONDS))
    reports = gather_reports(findings)
    for check in (check_sharing, check_all_reduce):
        if not any(lines for _, lines in reports):
            reports = gather_reports(check(folders))
    dist.destroy_process_group()
    return reports


def describe_network() -> str:
    """The loaded NCCL, the node's network adapters, and the variables that select one."""
    version = ctypes.c_int()
    with suppress(OSError):  # torch.cuda.nccl.version() is the version torch was built with, not the one in LD_PRELOAD
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    number = version.value
    nccl = f"NCCL {number // 10000}.{number // 100 % 100}.{number % 100}" if number else "no NCCL"
    adapters = [path.name for kind in ("infiniband", "cxi") for path in sorted(Path("/sys/class", kind).glob("*"))]
    names = ("NCCL_NET", "FI_PROVIDER", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "LD_PRELOAD")
    settings = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return ", ".join([nccl, f"adapters {' '.join(adapters) or 'none'}", *settings])


def gather_reports(findings: list[str]) -> list[Report]:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (HOST, findings))
    return reports


def check_device() -> list[str]:
    """Checks that this rank has its GPU and multiplies matrices on it correctly."""
    where = f"GPU {LOCAL_RANK}" if ON_GPU else "CPU"
    size = 8192 if ON_GPU else 512
    if ON_GPU and torch.cuda.device_count() <= LOCAL_RANK:
        return [f"{where} is missing: {explain_missing_gpus() or 'this node has too few GPUs'}"]
    try:
        twos = torch.full((size, size), 2.0, dtype=torch.bfloat16, device=DEVICE)
        wrong = int((twos @ twos != 4.0 * size).sum())  # a power of two: exact in bfloat16
    except RuntimeError as error:
        return [f"{where}: a matmul failed: {str(error).splitlines()[0]}"]
    return [f"{where}: a matmul gave {wrong:,} wrong values"] if wrong else []


def mark_of(folder: Path) -> Path:  # rank 0 writes it for the other nodes to see
    return folder / f".health-{os.environ['MASTER_PORT']}"


def check_writing(folders: dict[str, Path]) -> list[str]:
    findings = []
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(b"x" * 4096)
                os.fsync(file.fileno())
            if is_main_process():
                mark_of(folder).touch()
        except OSError as error:
            findings.append(f"{name} {folder} cannot be written: {error.strerror}; choose another folder")
    return findings


def check_sharing(folders: dict[str, Path]) -> list[str]:
    missing = [name for name, folder in folders.items() if LOCAL_RANK == 0 and not mark_of(folder).exists()]
    return [f"{name} {folders[name]} is not shared with the first node; choose a shared folder" for name in missing]


def check_all_reduce(folders: dict[str, Path]) -> list[str]:
    """Sums numbers over all ranks on their devices, by NCCL between GPUs and gloo otherwise."""
    ranks = dist.get_world_size()
    group = dist.new_group(backend="nccl" if ON_GPU else "gloo", timeout=timedelta(seconds=REDUCE_SECONDS))
    numbers = torch.full((1024,), float(RANK + 1), device=DEVICE)
    dist.all_reduce(numbers, group=group)
    if bool((numbers == ranks * (ranks + 1) / 2).all()):
        return []
    return [f"{numbers.device}: an all-reduce over {ranks} ranks gave {numbers[0].item():g}"]


if __name__ == "__main__":
    sfm_dpo.setup()
    sys.exit(main(sys.argv[1:]))
