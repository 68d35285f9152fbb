"""Leases and who has a run's folder: one of many at once; dead, expired and superseded owners; also as on NFS."""

import errno
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import filelock._soft
import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.run import lock
from sfm_dpo.run.lock import LOCK, Lease, describe_owner, read_owner, take_folder

ROOT = Path(__file__).resolve().parents[2]
ME = f"process {os.getpid()} on {platform.node()}"
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
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.1)


@pytest.fixture(params=["exchange", "no exchange"])
def disk(request, monkeypatch, tmp_path) -> Path:
    """A folder on a file system that swaps two names in one step, and on one that does not: NFS, Lustre, CephFS."""
    if request.param == "no exchange":
        monkeypatch.setattr(filelock._soft, "exchange_names", lambda source, target: False)
    return tmp_path


def test_a_lock_that_cannot_be_written_is_not_left_behind(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lock, "sync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / LOCK}'"):
            take_folder(tmp_path)
    assert not (tmp_path / LOCK).exists()
    take_folder(tmp_path).release()


@pytest.fixture
def slurm(monkeypatch):
    """A function: states of jobs -> what squeue says from now on, or its absence."""
    return lambda states: monkeypatch.setattr(lock, "squeue_states", lambda jobs: states)


def owner_of(path: Path) -> str:
    return describe_owner(read_owner(path))


def contenders(folder: Path) -> list[Lease]:
    return [Lease(folder / "a.lease"), Lease(folder / "a.lease")]


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
    processes = [start_contender(disk, *folders) for _ in range(PROCESSES)]
    try:
        for folder in folders:
            (folder / "go").touch()
            answers = [process.stdout.readline().strip() for process in processes]
            assert answers.count("won") == 1, answers
            winner = processes[answers.index("won")]
            assert read_owner(folder / LOCK)["pid"] == winner.pid
            assert sorted(path.name for path in folder.iterdir()) == [LOCK, "go"]
            for answer in answers:
                assert answer == "won" or f"locked by process {winner.pid} on {platform.node()} since " in answer
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_lease_that_is_moved_before_its_owner_is_written_is_lost(tmp_path, monkeypatch):
    """A contender takes a file without an owner's line for a damaged one."""
    lease = Lease(tmp_path / "a.lease")
    real = lease._lock.acquire
    monkeypatch.setattr(lease._lock, "acquire", lambda **kwargs: real(**kwargs) and lease.path.unlink())
    assert not lease._acquire() and not lease.path.exists()


def test_an_owners_line_that_went_into_another_file_is_written_again(tmp_path, monkeypatch):
    """Contenders that take over a stale lock exchange their files for a moment."""
    lease = Lease(tmp_path / "a.lease")
    sizes = []

    def sync(file):
        sizes.append(lease.path.stat().st_size)  # without the line, which is not flushed yet
        file.flush()
        if len(sizes) == 1:
            os.truncate(lease.path, sizes[0])

    monkeypatch.setattr(lock, "sync", sync)
    assert lease.take() and owner_of(lease.path) == ME
    lease.release()


def test_what_a_killed_process_had_is_taken_over_by_one_of_those_who_wait(disk, monkeypatch):
    code = "import sys, time; from pathlib import Path; from sfm_dpo.run.lock import Lease\n"
    code += "lease = Lease(Path(sys.argv[1])); print(lease.take(), flush=True); time.sleep(600)"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    owner = subprocess.Popen([sys.executable, "-c", code, disk / "a.lease"], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "True\n"
    one, two = contenders(disk)
    assert not one.take() and not two.take()
    assert owner_of(one.path) == f"job 77, process {owner.pid} on {platform.node()}"
    owner.kill()
    while not one.take():  # also before anybody has waited for the dead process
        time.sleep(0.01)
    owner.wait()
    assert not two.take()
    assert owner_of(one.path) == f"job 77, {ME}"
    one.release()
    assert list(disk.iterdir()) == []


def test_an_owner_on_another_host_has_it_while_it_renews(disk, monkeypatch):
    """Its clock is an hour off, in either direction: of its file's time only the change counts."""
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1.0)
    other = Lease(disk / "a.lease", lambda loss: None)
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "elsewhere")
        assert other.take()
    # filelock, too, must take it for another host's: it would find the process alive
    path = other.path
    path.write_text(path.read_text().replace(f"host={platform.node()}", "host=elsewhere"))
    one, two = contenders(disk)
    for _ in range(3):  # it is renewed every 1/15 s
        assert not one.take() and not two.take()
        time.sleep(0.6)
    assert owner_of(path) == f"process {os.getpid()} on elsewhere"
    other._lock._stop_heartbeat()  # the process is stopped
    for shift in (-3600, 3600):
        os.utime(path, (time.time() + shift, time.time() + shift))
        assert not one.take() and not two.take()
        time.sleep(0.6)
        assert not one.take() and not two.take()
    time.sleep(0.6)
    assert one.take() and not two.take()
    assert owner_of(path) == ME
    other.release()  # it wakes up, and gives up nothing of another's
    assert owner_of(path) == ME
    one.release()
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("text", ["owner={}", "owner=[]", 'owner={"pid": 1}\n'])
def test_a_lock_that_a_power_cut_has_damaged_is_taken_over_once_it_is_old(tmp_path, text):
    lock = tmp_path / LOCK
    lock.write_text(text)
    assert refused(tmp_path) == f"{LOCK} is damaged; wait 300 s, or remove it if no run uses the folder"
    assert owner_of(lock) == "a process that has just locked or released it"
    os.utime(lock, (time.time() - 400, time.time() - 400))
    take_folder(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{}", "filelock/2\npid=1\n"])
def test_a_lock_that_never_had_an_owner_is_taken_over(tmp_path, text):
    """As a process leaves it whose disk becomes read-only in between. What one does that was only slow: above."""
    (tmp_path / LOCK).write_text(text)
    take_folder(tmp_path).release()


def test_a_job_has_it_while_slurm_runs_it(tmp_path, slurm, monkeypatch):
    has_it = "locked by job 7, process 1 on n1 since 2026-01-31T18:03:11+00:00; wait, end that run, or choose another "
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
    write_lock(tmp_path, job="7", host="n1")
    assert refused(tmp_path).startswith("locked by job 7, process 1 on n1 since "), "a step of it on another node"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for before in ({"host": "n1"}, dead):
        write_lock(tmp_path, **{"job": "7"} | before)
        lease = take_folder(tmp_path)
        assert (read_owner(tmp_path / LOCK)["job"], read_owner(tmp_path / LOCK)["pid"]) == ("7", os.getpid())
        lease.release()
    (tmp_path / "go").touch()
    other = start_contender("exchange", tmp_path)  # two starts of one job at the same time
    assert other.stdout.readline() == "won\n"
    assert refused(tmp_path).startswith(f"locked by job 7, process {other.pid} on {platform.node()} since ")
    other.communicate("")


def test_a_superseded_run_ends_and_names_who_has_the_folder(tmp_path, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(os, "_exit", codes.append)
    lease = take_folder(tmp_path)
    (tmp_path / LOCK).unlink()
    time.sleep(0.5)
    assert not codes, "nobody has taken it"
    assert f"{LOCK} was removed or cannot be renewed" in capsys.readouterr().err
    lease.release()
    lease = take_folder(tmp_path)
    (tmp_path / LOCK).unlink()
    write_lock(tmp_path, host="n7", pid=99)
    time.sleep(0.5)
    assert codes == [2]
    assert "now locked by process 99 on n7; this run ends" in capsys.readouterr().err
    lease.release()
    assert read_owner(tmp_path / LOCK)["host"] == "n7"


def test_a_superseded_contenders_line_names_nobody(tmp_path):
    write_lock(tmp_path, pid=7)
    owner = read_owner(tmp_path / LOCK)
    with (tmp_path / LOCK).open("a") as file:
        file.write(f"owner={json.dumps(owner | {'pid': 8})}\n")
    assert read_owner(tmp_path / LOCK) == owner
