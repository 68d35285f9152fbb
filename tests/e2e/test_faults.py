"""Kills at random moments, and damaged files: the same command ends bitwise as if nothing had happened.

Two kills by default, four in the grid. `KILLS=20 python -m pytest tests/e2e/test_faults.py -k kill_9 -s` does twenty
and prints the table of docs/slurm.md; KILL_SEED makes another series.
"""

import contextlib
import os
import random
import shutil
import time
from pathlib import Path

import psutil
import pytest

from sfm_dpo.run.checkpoint import checkpoints, newest_checkpoint, step_of, why_incomplete
from tests.e2e.runs import Place, Run, assert_same_run, copy_run
from tests.e2e.test_resume import flip, shards, write_killed

KILLS = [int(os.environ["KILLS"])] if "KILLS" in os.environ else [2, pytest.param(4, marks=pytest.mark.grid)]
# When a rank is killed, and how long after the beginning of that, in seconds at most
PHASES = {"reference pass": 0.1, "training": 0.3, "saving a checkpoint": 0.03, "saving the model": 0.003}


def half_written(run: Run) -> list[Path]:
    return [c for c in checkpoints(run.folder) if not (c / "complete.json").exists()]


def wait_for_phase(run: Run, phase: str, place: Place, dice: random.Random) -> bool:
    """Waits for a random moment in `phase`; False if the run was over before."""
    if phase == "reference pass":
        wanted = dice.randrange(1, 60)
        reached = run.until(lambda: len(shards(place)) >= wanted)
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
    print("\n| # | processes | rank killed | during | had done | half-written | went on from | equal |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
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
        skipped = [f"{c} {why_incomplete(c)}: skipped" for c in later]
        written = shards(here)
        half = [c.name for c in half_written(run)]
        reached = f"{len(written)} shards" if phase == "reference pass" else f"{run.log.count('step ')} steps"

        done = run.status["state"] == "done"  # killed after the last file: everything must be there
        again = here.start(name, processes).finish()
        expected = ["already done"] if done else skipped
        if newest and not done:
            expected.append(f"resuming from {newest}")
        assert all(line in again.log for line in expected), expected
        assert_same_run(again, uninterrupted(processes))
        assert written.items() <= shards(here).items(), "a shard was computed twice"
        went_on = "had said done" if done else newest.name if newest else "the beginning"
        row = (number + 1, processes, victim, phase, reached, ", ".join(half) or "-", went_on)
        print("|", " | ".join(map(str, row)), "| bitwise |", flush=True)
        shutil.rmtree(run.folder)


@pytest.mark.parametrize("kind", ["flipped byte", "removed file", "clock set back"])
def test_damage_after_a_kill(place, uninterrupted, train_here, kind):
    """Of a random file of the checkpoints or the reference cache; or all were written in an hour from now."""
    folder = copy_run(uninterrupted(1), kind)
    write_killed(folder, 8)
    files = sorted(path for path in folder.glob("checkpoint-*/*") if path.is_file())
    files += shards(place)
    path = random.Random(kind).choice(files)
    if kind == "removed file":
        path.unlink()
    elif kind == "flipped byte":
        flip(path, path.stat().st_size // 2)
    else:
        later = time.time() + 3600
        for path in (*files, *folder.iterdir()):
            os.utime(path, (later, later))
    assert_same_run(train_here(kind), uninterrupted(1))
