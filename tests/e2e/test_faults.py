"""Faults of every kind at random moments, each followed by the same command, which ends bitwise where it would have.

Two of them by default, four in the grid; `FAULTS=50 python -m pytest tests/e2e/test_faults.py -s` does fifty and
prints a table; `FAULT_SEED` makes another series. Kills alone, and what they leave behind: test_resume.py.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sfm_dpo.run.checkpoint import checkpoints
from sfm_dpo.run.folder import read_status
from tests.e2e.runs import Place, Run, assert_same_run
from tests.e2e.test_resume import shards, wait_for_phase
from tests.hub_server import TOKEN, HubServer

FAULTS = [int(os.environ["FAULTS"])] if "FAULTS" in os.environ else [2, pytest.param(4, marks=pytest.mark.grid)]
FAULT_SEED = int(os.environ.get("FAULT_SEED", "1"))
PHASES = ("tokenisation", "reference pass", "training", "saving a checkpoint", "pushing")
KINDS = (
    "two starts",
    "kill -9",
    "full disk: output_dir",
    "flipped byte",
    "SIGSTOP",
    "removed file",
    "full disk: HF_HOME",
    "clock set back",
    "output_dir read-only",
    "full disk: TMPDIR",
    "kill -9",
)
DAMAGE = ("flipped byte", "removed file", "clock set back")  # after a kill


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    mounted = subprocess.run(options, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    """Read-only (ro) or not (rw), for root too; waits for writers."""
    command = ["mount", "-o", f"remount,{how}", str(folder)]
    while subprocess.run(command, capture_output=True, check=False).returncode:
        time.sleep(0.002)


def fill(disk: Path) -> None:
    """Somebody else's data, up to the last page."""
    with (disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def damage(kind: str, run: Run, place: Place, dice: random.Random) -> str:
    """Changes one file of the checkpoints and the reference cache, or all their times; returns which."""
    files = sorted(path for folder in checkpoints(run.folder) for path in folder.rglob("*") if path.is_file())
    files += shards(place)
    if not files:
        return "nothing there"
    path = dice.choice(files)
    if kind == "removed file":
        path.unlink()
    elif kind == "flipped byte":
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
    else:  # the clock is set back by an hour: whatever was written was written in an hour from now
        later = time.time() + 3600
        for path in (*files, *run.folder.iterdir()):
            os.utime(path, (later, later))
        return "all times"
    return f"{path.parent.name}/{path.name}" if path in files else path.name


def wait_for(phase: str, run: Run, place: Place, dice: random.Random) -> None:
    """Waits for a random moment of the phase, or for the run's end."""
    if phase == "tokenisation":
        run.until(lambda: (run.folder / ".lock").exists())
        time.sleep(dice.random())
    elif phase == "pushing":
        run.until(lambda: (read_status(run.folder) or {}).get("state") == "done", every=0.0005)
        time.sleep(dice.random() * 0.3)
    else:
        wait_for_phase(run, phase, place, dice)


def second_start(run: Run) -> str:
    """What a second start says, which must not train."""
    assert run.wait() == (1 if "ChildFailedError" in run.log else 2), run.log[-3000:]
    return next(line for line in run.log.splitlines() if "has it since" in line)


@pytest.mark.slow
@pytest.mark.timeout(300 + 240 * int(os.environ.get("FAULTS", "4")))
@pytest.mark.parametrize("faults", FAULTS)
def test_each_fault_then_the_same_command_ends_where_it_would_have(place, uninterrupted, tmp_path, faults):
    dice = random.Random(FAULT_SEED)
    print("\n| # | fault | processes | during | first end | what it said | then |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with HubServer() as hub:
        for number in range(faults):
            kind, phase = KINDS[number % len(KINDS)], PHASES[(number + 2) % len(PHASES)]
            if kind in DAMAGE:
                phase = dice.choice(("training", "saving a checkpoint"))  # when there is something to damage
            processes = 1 + (number // 3) % 2
            with small_disk(tmp_path / f"disk-{number}") as disk:
                run = one_fault(kind, phase, processes, disk, number, place, hub, dice)
                assert_same_run(run, uninterrupted(processes))


def one_fault(
    kind: str, phase: str, processes: int, disk: Path, number: int, place: Place, hub: HubServer, dice: random.Random
) -> Run:
    """Does one fault, mends what a person would mend, and returns the run that the same command then makes."""
    here = Place(place.folder, place.model, disk / "hf" if "HF_HOME" in kind else disk.with_name(f"hf-{number}"))
    output_dir = (disk if "output_dir" in kind else disk.parent) / f"run-{number}"
    env = {"TMPDIR": str(disk)} if "TMPDIR" in kind else {}
    fields = {"output_dir": output_dir}
    if phase == "pushing":
        env |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        fields |= {"push_to_hub": "true", "hub_model_id": f"lab/model-{number}"}
    run = here.start(f"fault-{number}", processes, env=env, **fields)
    rank = run.all_ranks(processes)[dice.randrange(processes)]  # before the moment: looking takes longer than saving
    wait_for(phase, run, here, dice)
    said = ""
    with contextlib.suppress(psutil.NoSuchProcess):  # it was over before
        if kind in ("kill -9", *DAMAGE):
            rank.kill()
        elif kind in ("SIGSTOP", "two starts"):
            rank.suspend()
            if kind == "SIGSTOP":
                time.sleep(3 + 4 * dice.random())
            else:  # the first run would be over before the second has read its packages
                said = second_start(here.start(f"fault-{number}-second", processes, env=env, **fields))
            rank.resume()
    if "full disk" in kind:
        fill(disk)
    elif kind == "output_dir read-only":
        remount(disk, "ro")
    code = run.wait()
    if kind in DAMAGE:
        said = damage(kind, run, here, dice)
    if kind == "output_dir read-only":
        remount(disk, "rw")
    (disk / "others").unlink(missing_ok=True)
    if "full disk" in kind or "read-only" in kind:
        lines = [line for line in run.log.splitlines() if line.startswith("error: ")]
        said = lines[-1][:100] if lines else ""
        assert code == 0 or any(word in run.log for word in ("space", "Read-only", "disk full")), run.log[-3000:]
        assert processes > 1 or "Traceback" not in run.log, run.log[-3000:]
    again = here.start(f"fault-{number}", processes, env=env, **fields).finish()
    then = "already done" if "already done" in again.log else "bitwise"
    starts = len(json.loads((output_dir / "environment.json").read_text())["starts"])
    row = (number + 1, kind, processes, phase, f"code {code}", said.replace(str(disk.parent), ""), then)
    print("|", " | ".join(map(str, row)), f"({starts} start(s)) |", flush=True)
    shutil.copytree(output_dir, kept := disk.with_name(f"kept-{number}"))
    return Run(kept, again.log_file, again.log_start, again.process)
