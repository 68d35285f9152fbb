"""A rank that stops or waits alone: the run ends with what the watchdog found, and leaves nothing behind."""

import errno
import json
import os
import pickle
import threading
import time
from unittest.mock import Mock

import pytest

from sfm_dpo.run.folder import read_status
from sfm_dpo.run.lock import LOCK
from sfm_dpo.train import watchdog as watchdog_module
from sfm_dpo.train.callbacks import Progress
from sfm_dpo.train.watchdog import Watchdog, find_culprit
from tests.e2e.runs import ROOT, Place

TIMEOUT = 10
FIELDS = {"hang_timeout": TIMEOUT, "num_train_epochs": 60, "save_steps": 2, "save_total_limit": 2}
FIELDS |= {"env": {"PET_SHUTDOWN_TIMEOUT": "2"}}  # torchrun's patience with a stopped process after TERM


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.grid)])
def test_a_stopped_rank_is_named_and_a_shorter_stop_is_not(place: Place, rank):
    run = place.start(f"stopped-rank-{rank}", 2, **FIELDS)
    processes = run.ranks(2)
    assert run.until_step(3), run.log[-3000:]
    ranks = dict(enumerate(sorted(processes, key=lambda process: process.pid)))  # in the order of their start
    ranks[rank].suspend()
    time.sleep(TIMEOUT * 0.5)
    ranks[rank].resume()
    step = run.status["step"] + 2  # the next one may have been computed before the stop
    assert run.until(lambda: run.status["step"] >= step, timeout=300, every=0.1), run.log[-3000:]
    assert run.status["state"] == "running"

    ranks[rank].suspend()
    assert run.until(lambda: run.status["state"] == "hung", timeout=30 * TIMEOUT, every=0.1), run.log[-3000:]
    assert run.wait(300) == 1  # the launcher's; the rank's is in the log
    status = run.status
    assert (status["exit_code"], status["rank"], status["step"] >= 3) == (70, rank, True)
    assert "/checkpoint-" in status["checkpoint"] and (ROOT / status["checkpoint"] / "complete.json").is_file()
    assert f"rank {rank} on {status['host']} is stuck in " in status["message"]
    assert "its process is stopped" in status["message"]
    environment = json.loads((run.folder / "environment.json").read_text())
    assert [hang["rank"] for hang in environment["hangs"]] == [rank]
    assert not (run.folder / LOCK).exists()
    assert not any(process.is_running() for process in ranks.values())
    stacks = (run.folder / f"stacks/rank-{1 - rank}.txt").read_text()
    assert "most recent call first" in stacks and "in train" in stacks
    assert status["message"].endswith("/stacks")  # torchfrtrace's argument
    collectives = pickle.loads((run.folder / f"stacks/collectives-{1 - rank}").read_bytes())
    assert collectives["entries"][-1]["state"] != "completed"  # the one that waits for the stopped rank


def test_a_rank_that_loads_has_ddp_timeout(tmp_path, monkeypatch):
    """And whose file system does not answer."""
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(watchdog_module, "read_file", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    watchdog = Watchdog(tmp_path, 0.2, 1.0, Progress())
    assert not ended.wait(0.8), "hang_timeout counts from the first micro-batch"
    assert ended.wait(20)
    watchdog.stop()
    status = read_status(tmp_path)
    assert status["state"] == "hung" and "moved for 1 s (ddp_timeout), loading at step 0" in status["message"]


def test_heartbeats_are_no_progress_of_the_final_model_s_save_into_their_folder(tmp_path):
    progress = Progress()
    progress.saving = tmp_path
    watchdog = Watchdog(tmp_path, 600, 600, progress)
    counts = []
    for name in ("heartbeats/rank-1.json", "heartbeats/rank-2.json", "model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("longer")
        counts.append(watchdog._describe_progress()["count"])
    watchdog.stop()
    assert counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize(
    ("changed", "rank", "why"),
    [
        ({"time": 90.0}, 1, "rank 1 on n1 is stuck in training_step (train_dpo.py:7): its process is stopped"),
        ({"count": [4, 0]}, 1, "rank 1 on n1 is stuck in training_step (train_dpo.py:7): it is behind the others"),
        ({}, None, "no rank is behind the others"),
    ],
)
def test_the_rank_named_is_the_stopped_one_else_the_one_behind(changed, rank, why):
    beats = [{"rank": number, "host": f"n{number}", "count": [5, 0], "time": 100.0} for number in range(3)]
    beats[1] |= {"where": "training_step (train_dpo.py:7)"} | changed
    culprit, cause = find_culprit(beats, patience=5)
    assert culprit.get("rank") == rank and cause.startswith(why)
    assert find_culprit([beats[0], {}], patience=5) == ({"rank": 1}, "rank 1 has not begun")
    for beat in beats[:2]:
        beat |= {"time": 90.0 - beat["rank"], "where": "all_reduce (x.py:1)"}
    assert find_culprit(beats, patience=5)[0]["rank"] == 0, "which has passed on the heartbeat of rank 1"
