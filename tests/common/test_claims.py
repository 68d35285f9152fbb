"""Claims: one of all who try has it; a dead owner's and an expired one are taken over, once."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sfm_dpo.common.claims import Claims

ME = f"process {os.getpid()} on {platform.node()}"


def test_one_has_it_until_it_gives_it_back(tmp_path):
    one, two = Claims(tmp_path), Claims(tmp_path)
    assert one.take("a") is None and two.take("b") is None
    assert two.take("a") == one.take("b") == ME
    one.release_all()
    assert two.take("a") is None
    two.release_all()
    assert list(tmp_path.iterdir()) == []


def start_owner(folder: Path) -> subprocess.Popen:
    """Another process that claims "a" and goes on living."""
    code = "import sys, time; from pathlib import Path; from sfm_dpo.common.claims import Claims\n"
    code += "print(Claims(Path(sys.argv[1])).take('a'), flush=True); time.sleep(600)"
    owner = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "None\n"
    return owner


@pytest.mark.slow  # a process that imports the package
def test_what_a_killed_process_had_is_taken_over_by_one_of_those_who_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    owner = start_owner(tmp_path)
    one, two = Claims(tmp_path), Claims(tmp_path)
    assert one.take("a") == two.take("a") == f"job 77, process {owner.pid} on {platform.node()}"
    owner.kill()
    while one.take("a"):  # also before anybody has waited for the dead process
        time.sleep(0.01)
    owner.wait()
    assert two.take("a") == f"job 77, {ME}"
    one.release_all()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_on_another_host_has_it_while_it_renews(tmp_path, monkeypatch):
    """Its clock is an hour off, in either direction: of its file's time only the change counts."""
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "elsewhere")
        other = Claims(tmp_path)
    assert other.take("a") is None
    claim, now = next(tmp_path.iterdir()), time.time()
    one, two = Claims(tmp_path, lease=1), Claims(tmp_path, lease=1)
    for shift in (-3600, -3599, 3600, 3601):
        os.utime(claim, (now + shift, now + shift))
        assert one.take("a") == two.take("a") == f"process {os.getpid()} on elsewhere"
        time.sleep(0.3)
    other.renew()
    assert one.take("a") == two.take("a") == f"process {os.getpid()} on elsewhere"
    time.sleep(1.1)
    assert one.take("a") is None
    assert two.take("a") == ME
    other.renew()  # it was only stopped, and has not lost what it is about to write
    other.release_all()
    one.release_all()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_whose_owner_was_killed_before_it_wrote_its_name_expires(tmp_path):
    (tmp_path / "a.claim0").touch()
    claims = Claims(tmp_path, lease=0.1)
    assert claims.take("a") == "process None on None"
    time.sleep(0.2)
    assert claims.take("a") is None
