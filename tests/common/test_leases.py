"""Leases: one of all who try has it; a dead owner's or an expired one is taken over, once, also where NFS refuses."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import filelock._soft
import pytest

from sfm_dpo.common import leases
from sfm_dpo.common.leases import Lease, describe_owner, read_owner

ME = f"process {os.getpid()} on {platform.node()}"


@pytest.fixture(params=["exchange", "no exchange"])
def disk(request, monkeypatch, tmp_path) -> Path:
    """A folder on a file system that swaps two names in one step, and on one that does not: NFS, Lustre, CephFS."""
    monkeypatch.setattr(leases, "SETTLE_SECONDS", 0.1)
    if request.param == "no exchange":
        monkeypatch.setattr(filelock._soft, "exchange_names", lambda source, target: False)
    return tmp_path


def owner_of(path: Path) -> str:
    return describe_owner(read_owner(path))


def contenders(folder: Path) -> list[Lease]:
    return [Lease(folder / "a.lease"), Lease(folder / "a.lease")]


def test_one_has_it_until_it_gives_it_back(tmp_path):
    one, two = contenders(tmp_path)
    assert one.take() and not two.take()
    assert owner_of(two.path) == ME
    two.release()
    assert not two.take()
    one.release()
    assert two.take()
    two.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # a process that imports the package
def test_what_a_killed_process_had_is_taken_over_by_one_of_those_who_wait(disk, monkeypatch):
    code = "import sys, time; from pathlib import Path; from sfm_dpo.common.leases import Lease\n"
    code += "lease = Lease(Path(sys.argv[1])); print(lease.take(), flush=True); time.sleep(600)"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    command = [sys.executable, "-c", code, disk / "a.lease"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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
    monkeypatch.setattr(leases, "LEASE_SECONDS", 1.0)
    losses = []
    other = Lease(disk / "a.lease", losses.append)
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


@pytest.mark.parametrize("text", ["", "[]", "filelock/2\npid=1\n"])
def test_a_file_that_names_nobody_expires(disk, monkeypatch, text):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.3)
    lease = Lease(disk / "a.lease")
    lease.path.write_text(text)
    assert not lease.take()
    assert owner_of(lease.path) == "a process that has just taken or released it"
    time.sleep(0.4)
    assert lease.take()
    lease.release()
