"""Whether a process or its job still runs, and how one ends."""

import os
import subprocess
import sys

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
    assert squeue_states(["17"]) is None and squeue_states([None]) == {}
    answer = """[ "$3" = --jobs=17,18,17,18 ] && echo RUNNING 17 17_N/A && echo PENDING 19 18_3"""
    known = {"17": "RUNNING", "17_N/A": "RUNNING", "19": "PENDING", "18_3": "PENDING"}
    for script, states in ((answer, known), ("exit 1", None)):
        (tmp_path / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "squeue").chmod(0o755)
        assert squeue_states(["18", None, "17", "17"]) == states


def test_a_rank_ends_as_the_interpreter_would_but_without_its_own_end():
    code = """
import atexit, sys, threading, time
from sfm_dpo.common.process import end_process
atexit.register(print, "registered")
threading.Thread(target=lambda: time.sleep(0.5) or print("thread")).start()
try:
    end_process(7)
except SystemExit:
    print("the interpreter's own end")
    raise
"""
    for env, first in (({}, "the interpreter's own end\n"), ({"LOCAL_RANK": "1"}, "")):
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (7, f"{first}thread\nregistered\n"), done.stderr
