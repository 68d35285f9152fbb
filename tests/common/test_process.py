"""Whether a process or its job still runs."""

import psutil

from sfm_dpo.common.process import this_process
from sfm_dpo.common.slurm import is_running, squeue_states


def test_another_process_of_that_number_is_not_the_owner_and_a_clock_that_is_set_changes_nothing(monkeypatch):
    owner = this_process()
    assert is_running(owner, None) and not is_running(owner | {"started": owner["started"] - 3600}, None)
    boot = psutil.boot_time()
    created = psutil.Process().create_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot - 3600)  # as /proc has it, once the clock is set back
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created - 3600)
    assert is_running(owner, None)


def test_squeue(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert squeue_states() is None
    answer = "echo '17 RUNNING'\necho '18 PENDING'"
    for script, states in ((answer, {"17": "RUNNING", "18": "PENDING"}), ("exit 1", None)):
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "squeue").chmod(0o755)
        assert squeue_states() == states
