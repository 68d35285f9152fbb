"""Node check: tests GPUs, compiler, folders and an all-reduce across all ranks before a job trains.

    torchrun --nproc-per-node 4 -m sfm_dpo.cluster.node_check --output_dir outputs/dpo

The batch scripts run it on all nodes. It imports only torch, to be fast. Ranks tell each other what they found through
rank 0's store: Gloo would need the nodes' names resolved, which NCCL does not.
"""

import argparse
import logging
import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

import sfm_dpo
from sfm_dpo.common.distributed import explain_missing_gpus, is_cpu_only, is_main_process, rank, world_size
from sfm_dpo.common.errors import NODE_CHECK_FAILED
from sfm_dpo.common.slurm import list_hosts

log = logging.getLogger("sfm_dpo.cluster.node_check")  # __name__ is __main__

JOIN_SECONDS = 300  # time for all ranks to join: importing torch from a cold shared disk is slow
REDUCE_SECONDS = 120  # the first communicator of many nodes takes long


class Fault(NamedTuple):
    text: str
    of_node: bool = True  # False: of a folder or a setting, which would be the same on another node


Report = tuple[str, list[Fault]]  # of a rank's host
HOST = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
RANK = rank()
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
# What the node should have: a node that has lost its GPUs must not pass as a CPU node
ON_GPU = (torch.cuda.is_available() or "SLURM_GPUS_ON_NODE" in os.environ) and not is_cpu_only()
DEVICE = torch.device("cuda", LOCAL_RANK) if ON_GPU else torch.device("cpu")
DEVICE_NAME = f"{'GPU' if ON_GPU else 'CPU'} {LOCAL_RANK}"
BACKEND = "nccl" if ON_GPU else "gloo"


def main(argv: list[str]) -> int:
    from huggingface_hub.constants import HF_HOME  # read once, when .env has been loaded

    parser = argparse.ArgumentParser(prog="python -m sfm_dpo.cluster.node_check", description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout raises; otherwise it kills the process
    folders = {"output_dir": Path(parser.parse_args(argv).output_dir), "HF_HOME": Path(HF_HOME)}
    store = None
    is_reporting = is_main_process()
    try:
        store = join_store()
        reports = check_all(folders, store)
    except Exception as error:  # torch raises no narrower class
        reports = explain_failure(error, store)
        is_reporting = True
    if is_reporting:
        for host, faults in reports:
            for fault in faults:
                log.error(f"unhealthy {host}: {fault.text}")
    if is_main_process():
        for folder in folders.values():
            with suppress(OSError):
                mark_of(folder).unlink()
    if is_main_process() or store is None:
        log_verdict(reports)
    return NODE_CHECK_FAILED if any(faults for _, faults in reports) else 0


def explain_failure(error: Exception, store: dist.Store | None) -> list[Report]:
    """Reports of the nodes that have not come, which only rank 0 can know, or of this rank."""
    if store is not None and is_main_process():
        keys = [f"host of rank {rank}" for rank in range(world_size())]
        present = {store.get(key).decode() for key in keys if store.check([key])}
        if absent := list_hosts(os.environ.get("SLURM_JOB_NODELIST", "")) - present:
            return [(host, [Fault("no process has reached the first node")]) for host in sorted(absent)]
    reason = " ".join(str(error).split())[:300]
    return [(HOST, [Fault(f"rank {RANK} could not finish the check: {reason}", of_node=False)])]


def log_verdict(reports: list[Report]) -> None:
    """Says what to do, or that all is well."""
    anyway = "SKIP_HEALTHCHECK=1 to train anyway"
    bad = sorted({host for host, faults in reports if any(fault.of_node for fault in faults)})
    if bad:
        log.error(f"submit again with --exclude={','.join(bad)}, or {anyway}")
    elif any(faults for _, faults in reports):
        log.error(f"correct this and submit again, or {anyway}")
    else:
        log.info(f"node check: {len({host for host, _ in reports})} node(s), {len(reports)} rank(s) are healthy")


def join_store() -> dist.Store:
    """The store of the first node, to which each rank gives its host."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    timeout = timedelta(seconds=JOIN_SECONDS)
    store = dist.TCPStore(*address, is_master=is_main_process(), timeout=timeout, wait_for_workers=False)
    store.set(f"host of rank {RANK}", HOST)
    return store


def check_all(folders: dict[str, Path], store: dist.Store) -> list[Report]:
    """Reports of all ranks up to the first check that fails: a bad device could make the next check hang."""
    faults = check_device()
    if LOCAL_RANK == 0:
        faults += check_writing(folders)
        faults += check_compiler() if ON_GPU else []
    reports = gather(store, "device", (HOST, faults))
    for check in (check_sharing, check_all_reduce):
        if not any(lines for _, lines in reports):
            reports = gather(store, check.__name__, (HOST, check(folders, store)))
    if dist.is_initialized():
        dist.destroy_process_group()
    store.set(f"end of rank {RANK}", "")
    if is_main_process():  # its store ends with it
        store.wait([f"end of rank {rank}" for rank in range(world_size())])
    return reports


def gather(store: Any, name: str, value: Any) -> list[Any]:
    """The values of all ranks under a name that is used once."""
    store.set(f"{name} of rank {RANK}", pickle.dumps(value))
    return [pickle.loads(store.get(f"{name} of rank {rank}")) for rank in range(world_size())]


def check_device() -> list[Fault]:
    """Checks that this rank has its GPU and multiplies matrices on it correctly."""
    size = 8192 if ON_GPU else 512
    if ON_GPU and torch.cuda.device_count() <= LOCAL_RANK:
        return [Fault(f"{DEVICE_NAME} is missing: {explain_missing_gpus() or 'this node has too few GPUs'}")]
    try:
        twos = torch.full((size, size), 2.0, dtype=torch.bfloat16, device=DEVICE)
        wrong = int((twos @ twos != 4.0 * size).sum())  # a power of two: exact in bfloat16
    except RuntimeError as error:
        return [Fault(f"{DEVICE_NAME}: a matmul failed: {str(error).splitlines()[0]}")]
    return [Fault(f"{DEVICE_NAME}: a matmul gave {wrong:,} wrong values")] if wrong else []


def check_compiler() -> list[Fault]:
    """Checks that Triton, which computes the LM head on a GPU, can compile: a launcher in C, then the kernel."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"  # as Triton chooses
    command = [compiler, "-fsyntax-only", f"-I{sysconfig.get_path('include', 'posix_prefix')}", "-xc", "-"]
    try:
        subprocess.run(command, input="#include <Python.h>", stderr=subprocess.PIPE, text=True, check=True)
        if ON_GPU:
            import triton

            triton.jit(nothing)[(1,)]()
            torch.cuda.synchronize()
    except Exception as error:  # Triton raises no narrower class
        reason = " ".join(f"{error} {getattr(error, 'stderr', '')}".split())[:400]
        remedy = "load a module with gcc and Python.h in scripts/site.sh, or set CC"
        return [Fault(f"Triton, which the loss needs, cannot compile: {reason}; {remedy}", of_node=False)]
    return []


def nothing():  # the smallest kernel
    pass


def mark_of(folder: Path) -> Path:  # rank 0 writes it for the other nodes to see
    return folder / f".health-{os.environ['MASTER_PORT']}"


def check_writing(folders: dict[str, Path]) -> list[Fault]:
    faults = []
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(b"x" * 4096)
                os.fsync(file.fileno())
            if is_main_process():
                mark_of(folder).touch()
        except OSError as error:
            text = f"{name} {folder} cannot be written: {error.strerror}; choose another folder"
            faults.append(Fault(text, of_node=False))
    return faults


def check_sharing(folders: dict[str, Path], store: dist.Store) -> list[Fault]:
    missing = [name for name, folder in folders.items() if LOCAL_RANK == 0 and not mark_of(folder).exists()]
    remedy = "is not shared with the first node; choose a shared folder"
    return [Fault(f"{name} {folders[name]} {remedy}", of_node=False) for name in missing]


def check_all_reduce(folders: dict[str, Path], store: dist.Store) -> list[Fault]:
    """Sums numbers over all ranks on their devices, by NCCL between GPUs and gloo otherwise."""
    ranks = world_size()
    timeout = timedelta(seconds=REDUCE_SECONDS)
    dist.init_process_group(BACKEND, store=store, rank=RANK, world_size=ranks, timeout=timeout)
    numbers = torch.full((1024,), float(RANK + 1), device=DEVICE)
    dist.all_reduce(numbers)
    if bool((numbers == ranks * (ranks + 1) / 2).all()):
        return []
    return [Fault(f"{numbers.device}: an all-reduce over {ranks} ranks gave {numbers[0].item():g}")]


def run(argv: list[str]) -> NoReturn:
    """Ends the process with `main`'s code, at once: threads of a failed process group would abort an orderly end."""
    sfm_dpo.setup(by_ranks=True)
    code = main(argv)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
