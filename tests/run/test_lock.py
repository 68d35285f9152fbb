"""Who has a run's folder: one of many at once, whoever died, jobs and processes as owners."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sfm_dpo.run import lock
from sfm_dpo.run.lock import is_running, read_owner, release_lock, squeue_states, take_lock

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, PROCESSES = 10, 6
# Each waits for the round's folder, all try at once, and live until all rounds are over.
CONTENDER = """
import sys, time
from pathlib import Path
from sfm_dpo.run.lock import take_lock
print("ready", flush=True)
for name in sys.argv[1:]:
    go = Path(name) / "go"
    while not go.exists():
        pass
    print("refused" if take_lock(Path(name) / ".lock") else "won", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def slurm(monkeypatch):
    """A function: states of jobs -> what squeue says from now on, or its absence."""
    return lambda states: monkeypatch.setattr(lock, "squeue_states", lambda: states)


@pytest.fixture
def dead() -> dict:
    """A part of a lock: a process of this host that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return {"host": platform.node(), "pid": ended.pid, "started": 5.0}


def write_lock(path: Path, **facts) -> None:
    owner = {"job": None, "cluster": None, "uid": os.getuid(), "time": "2026-01-31T18:03:11+00:00", "id": "old"}
    path.write_text(json.dumps(owner | {"host": "n1", "pid": 1, "started": 1.0} | facts))


@pytest.mark.parametrize("stale", [False, True], ids=["no lock", "a stale lock"])
def test_one_of_many_at_once_wins(tmp_path, dead, stale):
    folders = [tmp_path / str(n) for n in range(ROUNDS)]
    for folder in folders:
        folder.mkdir()
        if stale:
            write_lock(folder / ".lock", **dead)
    command = [sys.executable, "-c", CONTENDER, *map(str, folders)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    contenders = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(PROCESSES)]
    try:
        for contender in contenders:
            assert contender.stdout.readline() == "ready\n"
        for folder in folders:
            (folder / "go").touch()
            answers = [contender.stdout.readline().strip() for contender in contenders]
            assert sorted(answers) == ["refused"] * (PROCESSES - 1) + ["won"], answers
            winner = contenders[answers.index("won")]
            assert read_owner(folder / ".lock")["pid"] == winner.pid
            assert sorted(path.name for path in folder.iterdir()) == [".lock", "go"]
    finally:
        for contender in contenders:
            contender.communicate("")


def test_whoever_dies_while_taking_over_is_succeeded(tmp_path, dead):
    write_lock(tmp_path / ".lock", **dead)
    write_lock(tmp_path / ".lock-after-old", **dead, id="older")
    assert take_lock(tmp_path / ".lock") is None
    assert read_owner(tmp_path / ".lock")["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert take_lock(tmp_path / ".lock") is None  # ours already
    release_lock(tmp_path / ".lock")
    assert not list(tmp_path.iterdir())


def test_another_process_of_that_number_is_not_the_owner_and_a_clock_that_is_set_changes_nothing(
    tmp_path, monkeypatch
):
    assert take_lock(tmp_path / ".lock") is None
    owner = read_owner(tmp_path / ".lock")
    assert is_running(owner, None) and not is_running(owner | {"started": owner["started"] - 3600}, None)
    boot = psutil.boot_time()
    created = psutil.Process().create_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot - 3600)  # as /proc has it, once the clock is set back
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created - 3600)
    assert is_running(owner, None)


def test_a_job_has_it_while_slurm_runs_it(tmp_path, slurm, monkeypatch):
    path = tmp_path / ".lock"
    for states, running in (({"7": "RUNNING"}, True), ({"7": "COMPLETING"}, True), (None, None)):
        write_lock(path, job="7")
        slurm(states)
        assert take_lock(path) == read_owner(path) | {"running": running}
    for other in ({"uid": os.getuid() + 1}, {"cluster": "elsewhere"}):
        write_lock(path, **{"job": "7", "cluster": "here"} | other)
        slurm({"8": "RUNNING"})
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
        assert take_lock(path)["running"] is None  # squeue may not show it to us
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    for states in ({"7": "PENDING"}, {"8": "RUNNING"}):  # requeued after a crash; gone
        write_lock(path, job="7")
        slurm(states)
        assert take_lock(path) is None and read_owner(path)["pid"] == os.getpid()


def test_another_host_without_slurm_cannot_be_seen(tmp_path):
    write_lock(tmp_path / ".lock", host="another-node")
    assert take_lock(tmp_path / ".lock")["running"] is None


def test_all_starts_of_a_job_share_it_but_not_two_at_once(tmp_path, monkeypatch, slurm, dead):
    slurm({"7": "RUNNING"})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for before in (
        {"host": "n1"},
        dead,
    ):  # requeued on another node; the batch script's check_config.py, which has ended
        write_lock(tmp_path / ".lock", **{"job": "7"} | before)
        assert take_lock(tmp_path / ".lock") is None
        release_lock(tmp_path / ".lock")
        assert read_owner(tmp_path / ".lock")["id"] == "old", "the batch script's, who gives it up at the job's end"
    child = subprocess.Popen([sys.executable, "-c", CONTENDER, str(tmp_path / "sub")], cwd=ROOT, stdin=subprocess.PIPE)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "go").touch()
    while not read_owner(tmp_path / "sub" / ".lock"):
        time.sleep(0.05)
    assert take_lock(tmp_path / "sub" / ".lock")["pid"] == child.pid
    child.communicate(b"")
    assert take_lock(tmp_path / "sub" / ".lock") is None


def test_squeue(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert squeue_states() is None
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '17 RUNNING'\necho '18 PENDING'\n")
    (tmp_path / "squeue").chmod(0o755)
    assert squeue_states() == {"17": "RUNNING", "18": "PENDING"}
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert squeue_states() is None
