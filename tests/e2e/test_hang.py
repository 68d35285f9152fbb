"""A rank that stops or waits alone: the run ends with what the watchdog found, and leaves nothing behind."""

import json
import time

import psutil
import pytest

from tests.e2e.runs import ROOT, Place, Run

TIMEOUT = 10
FIELDS = {"hang_timeout": TIMEOUT, "num_train_epochs": 60, "save_steps": 2, "save_total_limit": 2}
FIELDS |= {"env": {"PET_SHUTDOWN_TIMEOUT": "2"}}  # torchrun's patience with a stopped process after TERM


def until_training(run: Run) -> dict[int, psutil.Process]:
    processes = run.ranks(2)
    assert run.until_step(3), run.log[-3000:]
    return {int(process.environ()["RANK"]): process for process in processes}


def assert_hung(run: Run, ranks: dict[int, psutil.Process], rank: int, since: float) -> None:
    assert run.until(lambda: run.status["state"] == "hung", timeout=6 * TIMEOUT, every=0.1), run.log[-3000:]
    seconds = time.monotonic() - since
    assert TIMEOUT * 0.9 < seconds < TIMEOUT + 15, seconds
    assert run.wait(60) == 1  # the launcher's; the rank's is in the log
    status = run.status
    assert (status["exit_code"], status["rank"], status["step"] >= 3) == (70, rank, True)
    assert "/checkpoint-" in status["checkpoint"] and (ROOT / status["checkpoint"] / "complete.json").is_file()
    assert f"rank {rank} on {status['host']} is stuck in " in status["message"]
    environment = json.loads((run.folder / "environment.json").read_text())
    assert [hang["rank"] for hang in environment["hangs"]] == [rank]
    assert not any(process.is_running() for process in ranks.values())


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.grid)])
def test_a_stopped_rank_is_named_and_a_shorter_stop_is_not(place: Place, rank):
    run = place.start(f"stopped-rank-{rank}", 2, **FIELDS)
    ranks = until_training(run)
    ranks[rank].suspend()
    time.sleep(TIMEOUT * 0.5)
    ranks[rank].resume()
    step = run.status["step"]
    assert run.until(lambda: run.status["step"] > step, timeout=60, every=0.1), run.log[-3000:]
    assert run.status["state"] == "running"
    since = time.monotonic()
    ranks[rank].suspend()
    assert_hung(run, ranks, rank, since)
    assert "its process is stopped" in run.status["message"]
    stacks = (run.folder / f"stacks/rank-{1 - rank}.txt").read_text()
    assert "most recent call first" in stacks and "in train" in stacks


SLEEPS = """
import os, sys, time
sys.path.insert(0, {root!r})
import train_dpo

step = train_dpo.SFMDPOTrainer.training_step

def training_step(self, *args, **kwargs):
    if os.environ["RANK"] == "1" and self.state.global_step == 4:
        time.sleep(1000)
    return step(self, *args, **kwargs)

train_dpo.SFMDPOTrainer.training_step = training_step
sys.exit(train_dpo.main(sys.argv[1:]))
"""


@pytest.mark.grid
def test_a_rank_that_waits_in_a_collective_alone(place: Place, tmp_path):
    """Rank 1 lives, but does something else: it is behind, and the line says where."""
    script = tmp_path / "train_dpo.py"
    script.write_text(SLEEPS.format(root=str(ROOT)))
    run = place.start("in-a-collective", 2, script=script, **FIELDS)
    ranks = until_training(run)
    assert run.until_step(4)
    assert_hung(run, ranks, 1, time.monotonic())
    assert "is stuck in training_step (train_dpo.py:" in run.status["message"]
    assert "it is behind the others" in run.status["message"]
