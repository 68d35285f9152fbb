"""Kills and other faults at random moments: the same command ends bitwise as if nothing had happened.

Two of each by default, four in the grid. `KILLS=20 python -m pytest tests/e2e/test_faults.py -k kill_9 -s` does twenty
kills and prints the table of docs/internals/testing.md, `FAULTS=50 ... -k each_fault -s` fifty faults; KILL_SEED and
FAULT_SEED make another series.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from sfm_dpo.run.checkpoint import checkpoints, newest_checkpoint, step_of, why_incomplete
from sfm_dpo.run.folder import read_status
from tests.e2e.runs import Place, Run, assert_same_run
from tests.e2e.test_resume import flip, shards
from tests.hub_server import TOKEN, HubServer
from tests.toolbox import small_disk

KILLS = [int(os.environ["KILLS"])] if "KILLS" in os.environ else [2, pytest.param(4, marks=pytest.mark.grid)]
# When a rank is killed, and how long after the beginning of that, in seconds at most
PHASES = {"reference pass": 0.1, "training": 0.3, "saving a checkpoint": 0.03, "saving the model": 0.003}
PHASES |= {"preflight": 0.3}


def half_written(run: Run) -> list[Path]:
    return [c for c in checkpoints(run.folder) if not (c / "complete.json").exists()]


def wait_for_phase(run: Run, phase: str, place: Place, dice: random.Random) -> bool:
    """Waits for a random moment in `phase`; False if the run was over before."""
    if phase == "reference pass":
        wanted = dice.randrange(1, 60)
        reached = run.until(lambda: len(shards(place)) >= wanted)
    elif phase == "preflight":
        reached = run.until(lambda: "the largest micro-batch has" in run.log)
    elif phase == "training":
        reached = run.until_step(dice.randrange(1, 8))
    elif phase == "saving a checkpoint":
        nth = dice.randrange(1, 5)
        seen: set[Path] = set()

        def saving() -> bool:
            seen.update(half_written(run))
            return len(seen) >= nth and bool(half_written(run))

        reached = run.until(saving, every=0.0005)
    else:
        reached = run.until(lambda: (run.folder / "config.json").exists(), every=0.0005)
    time.sleep(dice.random() * PHASES[phase])
    return reached


@pytest.mark.timeout(300 + 240 * int(os.environ.get("KILLS", "4")))
@pytest.mark.parametrize("kills", KILLS)
def test_kill_9_of_a_random_rank_at_random_moments(place, uninterrupted, tmp_path, kills):
    dice = random.Random(int(os.environ.get("KILL_SEED", "4")))
    print("\n| # | processes | rank killed | during | resumed from | equal |", flush=True)
    for number in range(kills):
        phase = list(PHASES)[number % len(PHASES)]
        processes = 1 + (number + number // len(PHASES)) % 2
        here = place
        if phase == "reference pass":  # a cache of its own, or there would be nothing to compute
            here = Place(place.folder, place.model, tmp_path / f"hf-{number}")
        name = f"killed-{number}"
        run = here.start(name, processes)
        victim = dice.randrange(processes)
        rank = run.ranks(processes)[victim]  # before the moment: looking takes longer than saving
        assert wait_for_phase(run, phase, here, dice), run.log[-4000:]
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
        assert run.wait(120) != 0, "the run was over before it was killed: nothing was shown"
        newest = newest_checkpoint(run.folder)
        later = [c for c in checkpoints(run.folder) if step_of(c) > step_of(newest)]
        skipped = [f"{c} {why_incomplete(c)}; skipped" for c in later]
        written = shards(here)

        done = run.status["state"] == "done"  # killed after the last file: everything must be there
        again = here.start(name, processes).finish()
        expected = ["already done"] if done else skipped
        if newest and not done:
            expected.append(f"resuming from {newest}")
        assert all(line in again.log for line in expected), expected
        assert_same_run(again, uninterrupted(processes))
        assert written.items() <= shards(here).items(), "a shard was computed twice"
        print(f"| {number + 1} | {processes} | {victim} | {phase} | {newest and newest.name} | bitwise |", flush=True)
        shutil.rmtree(run.folder)


FAULTS = [int(os.environ["FAULTS"])] if "FAULTS" in os.environ else [2, pytest.param(4, marks=pytest.mark.grid)]
MOMENTS = ("tokenisation", "reference pass", "training", "saving a checkpoint", "pushing", "preflight")
KINDS = ("two starts", "kill -9", "full disk: output_dir", "flipped byte", "SIGSTOP", "removed file")
KINDS += ("full disk: HF_HOME", "clock set back", "output_dir read-only", "full disk: TMPDIR", "SIGINT", "SIGTERM")
AFTER_A_KILL = ("flipped byte", "removed file", "clock set back")


@pytest.mark.timeout(300 + 240 * int(os.environ.get("FAULTS", "4")))
@pytest.mark.parametrize("faults", FAULTS)
def test_each_fault_then_the_same_command_ends_bitwise(place, uninterrupted, tmp_path, faults):
    dice = random.Random(int(os.environ.get("FAULT_SEED", "1")))
    print("\n| # | fault | processes | during | first end |", flush=True)
    with HubServer() as hub:
        for number in range(faults):
            kind = KINDS[number % len(KINDS)]
            moment = MOMENTS[(number + 2) % len(MOMENTS)]
            if kind in AFTER_A_KILL:
                moment = dice.choice(("training", "saving a checkpoint"))  # when there is something to damage
            processes = 1 + (number // 3) % 2
            with small_disk(tmp_path / f"disk-{number}", "64m") as disk:
                first, again = one_fault(kind, moment, processes, disk, number, place, hub, dice)
                print(f"| {number + 1} | {kind} | {processes} | {moment} | code {first} |", flush=True)
                assert_same_run(again, uninterrupted(processes))


def one_fault(kind, moment, processes, disk, number, place, hub, dice) -> tuple[int, Run]:
    """The exit code of the run that met the fault, and the run that the same command then makes."""
    home = disk / "hf" if "HF_HOME" in kind else disk.with_name(f"hf-{number}")
    here = Place(place.folder, place.model, home)
    fields: dict = {"output_dir": (disk if "output_dir" in kind else disk.parent) / f"run-{number}"}
    env = {"TMPDIR": str(disk)} if "TMPDIR" in kind else {}
    if moment == "pushing":
        env |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        fields |= {"push_to_hub": "true", "hub_model_id": f"lab/model-{number}"}
    run = here.start(f"fault-{number}", processes, env=dict(env), **fields)
    rank = run.ranks(processes)[dice.randrange(processes)]  # before the moment: looking takes longer than saving
    if moment == "tokenisation":
        run.until(lambda: (run.folder / ".lock").exists())
        time.sleep(dice.random())
    elif moment == "pushing":
        run.until(lambda: (read_status(run.folder) or {}).get("state") == "done", every=0.0005)
        time.sleep(dice.random() * 0.3)
    else:
        wait_for_phase(run, moment, here, dice)
    with contextlib.suppress(psutil.NoSuchProcess):  # it was over before
        if kind in ("kill -9", *AFTER_A_KILL):
            rank.kill()
        elif kind in ("SIGINT", "SIGTERM"):
            rank.send_signal(signal.Signals[kind])
        elif kind == "SIGSTOP":
            rank.suspend()
            time.sleep(3 + 4 * dice.random())
            rank.resume()
        elif kind == "two starts":
            rank.suspend()  # or the first run would be over before the second has read its packages
            second = here.start(f"fault-{number}-second", processes, env=dict(env), **fields)
            assert second.wait() == (1 if processes > 1 else 2) and ": locked by " in second.log, second.log[-3000:]
            rank.resume()
    if "full disk" in kind:
        fill(disk)
    elif kind == "output_dir read-only":
        remount(disk, "ro")
    code = run.wait()
    if kind in ("SIGINT", "SIGTERM") and processes == 1:
        assert code in (0, 130) and "Traceback" not in run.log, run.log[-3000:]
    if kind in AFTER_A_KILL:
        damage(kind, run, here, dice)
    if kind == "output_dir read-only":
        remount(disk, "rw")
    (disk / "others").unlink(missing_ok=True)
    if code and ("full disk" in kind or "read-only" in kind):
        assert any(word in run.log for word in ("space", "Read-only", "disk full")), run.log[-3000:]
        assert processes > 1 or "Traceback" not in run.log, run.log[-3000:]
    again = here.start(f"fault-{number}", processes, env=dict(env), **fields).finish()
    kept = disk.with_name(f"kept-{number}")  # the disk goes
    shutil.copytree(fields["output_dir"], kept)
    return code, Run(kept, again.log_file, again.log_start, again.process)


def damage(kind: str, run: Run, place: Place, dice: random.Random) -> None:
    """Changes one file of the checkpoints or the reference cache, or the times of all."""
    files = sorted(path for folder in checkpoints(run.folder) for path in folder.rglob("*") if path.is_file())
    files += shards(place)
    if not files:
        return
    path = dice.choice(files)
    if kind == "removed file":
        path.unlink()
    elif kind == "flipped byte":
        flip(path, dice.randrange(path.stat().st_size))
    else:  # whatever was written was written in an hour from now
        later = time.time() + 3600
        for path in (*files, *run.folder.iterdir()):
            os.utime(path, (later, later))


def fill(disk: Path) -> None:
    """Somebody else's data, up to the last page."""
    with (disk / "others").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def remount(folder: Path, how: str) -> None:
    """Read-only (ro) or not (rw), for root too; waits for writers."""
    command = ["mount", "-o", f"remount,{how}", str(folder)]
    while subprocess.run(command, capture_output=True, check=False).returncode:
        time.sleep(0.002)
