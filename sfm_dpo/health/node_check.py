"""Can these nodes train? GPUs, disks, and an all-reduce across all ranks, in seconds, before the job's hours.

    python -m sfm_dpo.health.node_check --output_dir outputs/dpo                                  one process
    torchrun --nproc-per-node 4 -m sfm_dpo.health.node_check --output_dir outputs/dpo             a node with 4 GPUs

The batch scripts run it on all nodes. Each rank looks at its own device; the first of a node also at nvidia-smi and
the disks. All ranks then meet: what one found, all know, and rank 0 prints one line a finding and the --exclude that
leaves the bad nodes out. Without GPUs the same runs with what applies. Exit code 69 (EX_UNAVAILABLE) if anything is
wrong. It imports torch alone, so that it is over before the trainer's own imports would be.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

UNHEALTHY = 69
MEET_SECONDS = 120  # a rank that is not there by then does not come: importing torch from a cold disk takes long
REDUCE_SECONDS = 45
MIN_FREE_GIB = 2.0  # logs, caches and reports; checkpoints are checked against their size when the model is known
MAX_USED_MIB = 2048  # of GPU memory before we start: above it somebody else's process is there
MATMUL = {"cuda": (8192, torch.bfloat16), "cpu": (512, torch.float32)}
SMI_FIELDS = "index,memory.used,ecc.errors.uncorrected.volatile.total"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m sfm_dpo.health.node_check", description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", required=True)
    output_dir = parser.parse_args(argv).output_dir
    findings = []
    if local_rank() == 0:
        findings += check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        for name, folder in folders(output_dir).items():
            findings += check_folder(name, folder)
    findings += check_matmul()
    try:
        everyone = meet(findings, Path(output_dir))
    except Exception as error:  # torch has no narrower one: any failure here is the finding
        findings.append(f"rank {rank()} could not talk to the others: {' '.join(str(error).split())[:300]}")
        report({host(): findings})
        return UNHEALTHY
    bad: dict[str, list[str]] = {}
    for name, lines in everyone:
        if lines:
            bad.setdefault(name, []).extend(lines)
    if rank() == 0:
        report(bad)
        if not bad:
            print(f"health: {len({name for name, _ in everyone})} node(s), {len(everyone)} rank(s) fine", flush=True)
    return UNHEALTHY if bad else 0


def report(bad: dict[str, list[str]]) -> None:
    """One line a finding, and the option that leaves the nodes out."""
    for name, lines in bad.items():
        for line in lines:
            print(f"unhealthy {name}: {line}", flush=True)
    if bad:
        print(
            f"submit again with --exclude={','.join(sorted(bad))}, or SKIP_HEALTHCHECK=1 to train anyway", flush=True
        )


def check_gpus(wanted: int) -> list[str]:
    """What is wrong with the node's GPUs as a whole, by nvidia-smi; nothing where the run is on CPU."""
    if not on_gpu():
        return []
    if torch.cuda.device_count() < wanted:
        return [f"{torch.cuda.device_count()} GPU(s) for {wanted} processes"]
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        done = subprocess.run([*command, *([f"--id={visible}"] if visible else [])], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi: {error}"]
    if done.returncode:
        return [f"nvidia-smi: {(done.stdout + done.stderr).decode().strip()}"]
    return read_smi(done.stdout.decode())


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
        return []  # check_gpus has said so
    where = f"GPU {local_rank()}" if on_gpu() else "CPU"
    size, dtype = MATMUL["cuda" if on_gpu() else "cpu"]
    try:
        twos = torch.full((size, size), 2.0, dtype=dtype, device=device())
        wrong = int((twos @ twos != 4.0 * size).sum())  # a power of two: exact in bfloat16 as well
        noise = torch.randn(size, size, dtype=dtype, device=device())
        wrong += int((~(noise @ noise).isfinite()).sum())
    except RuntimeError as error:
        return [f"{where}: a matmul failed: {str(error).splitlines()[0]}"]
    return [f"{where}: {wrong:,} wrong values in a matmul"] if wrong else []


def folders(output_dir: str) -> dict[str, Path]:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return {"output_dir": Path(output_dir), "HF_HOME": Path(home).expanduser(), "TMPDIR": Path(tempfile.gettempdir())}


def check_folder(name: str, folder: Path) -> list[str]:
    """Whether a folder can be written, and has room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".health-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return [f"{name} {folder} cannot be written: {error.strerror}"]
    free = shutil.disk_usage(folder).free / 2**30
    return [f"{name} {folder} has {free:.1f} GiB free, {MIN_FREE_GIB:g} are needed"] if free < MIN_FREE_GIB else []


def meet(findings: list[str], output_dir: Path) -> list[tuple[str, list[str]]]:
    """All ranks' (host, findings), after a look at whether the nodes share their folders, and an all-reduce."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # started without a launcher
    dist.init_process_group("gloo", timeout=timedelta(seconds=MEET_SECONDS))
    marks = [make_marks(output_dir) if rank() == 0 else {}]
    dist.broadcast_object_list(marks, src=0)
    for name, mark in marks[0].items() if local_rank() == 0 else ():
        mine = folders(str(output_dir))[name]
        if not (mine / mark.name).exists():
            findings.append(f"{name} {mine} is not the first node's: all nodes must share the folder")
    everyone = _gather(findings)
    if rank() == 0:
        for mark in marks[0].values():
            mark.unlink(missing_ok=True)
    if not any(lines for _, lines in everyone):  # a device that failed alone would only hang the others here
        everyone = _gather(check_all_reduce())
    dist.destroy_process_group()
    return everyone


def check_all_reduce() -> list[str]:
    """Adds up numbers over all ranks on their devices: NCCL between GPUs, gloo otherwise."""
    ranks = dist.get_world_size()
    group = dist.new_group(backend="nccl" if on_gpu() else "gloo", timeout=timedelta(seconds=REDUCE_SECONDS))
    numbers = torch.full((1024,), float(rank() + 1), device=device())
    dist.all_reduce(numbers, group=group)
    if bool((numbers == ranks * (ranks + 1) / 2).all()):
        return []
    return [f"{device()}: an all-reduce over {ranks} ranks gave {numbers[0].item():g}"]


def _gather(findings: list[str]) -> list[tuple[str, list[str]]]:
    everyone: list[tuple[str, list[str]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (host(), findings))
    return everyone


def make_marks(output_dir: Path) -> dict[str, Path]:
    """A file in each folder that all nodes must see."""
    marks = {}
    for name in ("output_dir", "HF_HOME"):
        mark = folders(str(output_dir))[name].absolute() / f".health-{os.getpid()}"
        with suppress(OSError):  # has been found already
            mark.touch()
            marks[name] = mark
    return marks


def host() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def on_gpu() -> bool:
    """By what the node should have: a node that has lost its GPUs must not pass as one without."""
    return os.environ.get("DS_ACCELERATOR") != "cpu" and (
        torch.cuda.is_available() or "SLURM_GPUS_ON_NODE" in os.environ
    )


def device() -> torch.device:
    if not on_gpu():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank())
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
