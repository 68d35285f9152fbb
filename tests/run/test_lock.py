"""Who has a run's folder: one of many at once, whoever died, jobs and processes as owners, earlier versions."""

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sfm_dpo.common import leases
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.leases import read_owner, this_process
from sfm_dpo.run import lock
from sfm_dpo.run.lock import LOCK, is_running, squeue_states, take_folder

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 8
PROCESSES = 5
# Each waits for the round's folder, all try at once, and live until all rounds are over.
CONTENDER = """
import sys, time
from pathlib import Path
import filelock._soft
from sfm_dpo.common.errors import UserError
from sfm_dpo.run.lock import take_folder
if sys.argv[1] == "no exchange":
    filelock._soft.exchange_names = lambda source, target: False
print("ready", flush=True)
leases = []
for name in sys.argv[2:]:
    while not (Path(name) / "go").exists():
        time.sleep(0.001)
    try:
        leases.append(take_folder(Path(name)))
        print("won", flush=True)
    except UserError as error:
        print(error, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.1)


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


def write_lock(run: Path, **facts) -> None:
    owner = {"job": None, "cluster": None, "uid": os.getuid(), "time": "2026-01-31T18:03:11+00:00"}
    owner |= {"host": "n1", "pid": 1, "started": 1.0} | facts
    (run / LOCK).write_text(f"pid={owner['pid']}\nowner={json.dumps(owner)}\n")


def refused(run: Path) -> str:
    with pytest.raises(UserError) as caught:
        take_folder(run)
    return str(caught.value).removeprefix(f"output_dir {run}: ")


def start_contender(*arguments) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    contender = subprocess.Popen([sys.executable, "-c", CONTENDER, *map(str, arguments)], cwd=ROOT, **pipes)
    assert contender.stdout.readline() == "ready\n"
    return contender


@pytest.mark.parametrize("disk", ["exchange", "no exchange"])
def test_one_of_many_at_once_wins_and_a_stale_lock_is_taken_over_by_one(tmp_path, dead, disk):
    folders = [tmp_path / str(n) for n in range(ROUNDS)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        if number % 2:
            write_lock(folder, **dead)
    contenders = [start_contender(disk, *folders) for _ in range(PROCESSES)]
    try:
        for folder in folders:
            (folder / "go").touch()
            answers = [contender.stdout.readline().strip() for contender in contenders]
            assert answers.count("won") == 1, answers
            winner = contenders[answers.index("won")]
            assert read_owner(folder / LOCK)["pid"] == winner.pid
            assert sorted(path.name for path in folder.iterdir()) == [LOCK, "go"]
            for answer in answers:
                assert answer == "won" or f"process {winner.pid} on {platform.node()} has it since " in answer
    finally:
        for contender in contenders:
            contender.kill()
            contender.communicate()


def test_another_process_of_that_number_is_not_the_owner_and_a_clock_that_is_set_changes_nothing(monkeypatch):
    owner = this_process()
    assert is_running(owner, None) and not is_running(owner | {"started": owner["started"] - 3600}, None)
    boot = psutil.boot_time()
    created = psutil.Process().create_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot - 3600)  # as /proc has it, once the clock is set back
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created - 3600)
    assert is_running(owner, None)


def test_a_job_has_it_while_slurm_runs_it(tmp_path, slurm, monkeypatch):
    has_it = (
        "job 7, process 1 on n1 has it since 2026-01-31T18:03:11+00:00; wait, end it, or choose another output_dir"
    )
    for states in ({"7": "RUNNING"}, {"7": "COMPLETING"}, None):
        write_lock(tmp_path, job="7")
        slurm(states)
        assert refused(tmp_path).startswith(has_it)
    for other in ({"uid": os.getuid() + 1}, {"cluster": "elsewhere"}):
        write_lock(tmp_path, **{"job": "7", "cluster": "here"} | other)
        slurm({"8": "RUNNING"})
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
        assert refused(tmp_path).startswith(has_it)  # squeue may not show it to us
    monkeypatch.delenv("SLURM_CLUSTER_NAME")
    for states in ({"7": "PENDING"}, {"8": "RUNNING"}):  # requeued after a crash; gone
        write_lock(tmp_path, job="7")
        slurm(states)
        take_folder(tmp_path).release()


def test_a_requeued_job_takes_its_own_folder_again(tmp_path, monkeypatch, slurm, dead):
    slurm({"7": "RUNNING"})
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for before in ({"host": "n1"}, dead):
        write_lock(tmp_path, **{"job": "7"} | before)
        lease = take_folder(tmp_path)
        assert (read_owner(tmp_path / LOCK)["job"], read_owner(tmp_path / LOCK)["pid"]) == ("7", os.getpid())
        lease.release()
    (tmp_path / "go").touch()
    other = start_contender("exchange", tmp_path)  # two starts of one job at the same time
    assert other.stdout.readline() == "won\n"
    assert refused(tmp_path).startswith(f"job 7, process {other.pid} on {platform.node()} has it since ")
    other.communicate("")


@pytest.mark.parametrize("text", ["", "[]", '{"job": "7"}'])
def test_a_damaged_lock_is_one_line(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    assert refused(tmp_path) == f"{LOCK} is damaged; remove it if nothing trains there"


def test_a_superseded_run_ends_and_names_who_has_the_folder(tmp_path, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    lease = take_folder(tmp_path)
    (tmp_path / LOCK).unlink()
    time.sleep(0.5)
    assert not codes, "nobody has taken it"
    assert f"{LOCK} was removed or cannot be renewed" in capsys.readouterr().out
    lease.release()
    lease = take_folder(tmp_path)
    (tmp_path / LOCK).unlink()
    write_lock(tmp_path, host="n7", pid=99)
    time.sleep(0.5)
    assert codes == [2]
    assert re.search("process 99 on n7 has taken it from this run, which ends here", capsys.readouterr().err)
    lease.release()
    assert read_owner(tmp_path / LOCK)["host"] == "n7"


def test_a_superseded_contenders_line_names_nobody(tmp_path):
    write_lock(tmp_path, pid=7)
    owner = read_owner(tmp_path / LOCK)
    with (tmp_path / LOCK).open("a") as file:
        file.write(f"owner={json.dumps(owner | {'pid': 8})}\n")
    assert read_owner(tmp_path / LOCK) == owner


def test_squeue(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert squeue_states() is None
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '17 RUNNING'\necho '18 PENDING'\n")
    (tmp_path / "squeue").chmod(0o755)
    assert squeue_states() == {"17": "RUNNING", "18": "PENDING"}
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert squeue_states() is None
