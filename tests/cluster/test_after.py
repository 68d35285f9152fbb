"""The end of a batch job: every way a start may end, and what Slurm is asked to do (its commands are scripts here)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sfm_dpo.cluster.after import Job, choose_next, describe_job
from sfm_dpo.run.folder import ENVIRONMENT, STATUS, State, write_status

ROOT = Path(__file__).resolve().parents[2]
JOB = Job("7", "5_2", 0)
STOPPED = {"state": "stopped", "exit_code": 75, "message": "on request", "step": 8, "job": "7"}
IN_REFERENCE_PASS = STOPPED | {"step": 0, "shards": 2}
HUNG = {"state": "hung", "exit_code": 70, "message": "no rank moved", "step": 8, "job": "7", "host": "n1"}
HUNG |= {"checkpoint": "outputs/r/checkpoint-6"}
BEGAN = {"starts": [{"step": 0}, {"step": 4}]}
RESTART = {"restarts": 1}
NOT_BEGUN = {"launcher_code": 75}
HANGS = [{"job": "7"}] * 2 + [{"job": "6"}] * 5


def end(status, before=None, environment=None, **job):
    return choose_next(Path("outputs/r"), status, before or {}, environment or {}, replace(JOB, **job))


@pytest.mark.parametrize(
    ("status", "before", "environment", "job", "line"),
    [
        (STOPPED, {}, BEGAN, {}, "stopped and requeued (restart 1 of at most 20)"),
        (STOPPED, {}, BEGAN, RESTART, "stopped and requeued (restart 2 of at most 20)"),
        (STOPPED | {"step": 4}, {}, BEGAN, RESTART, "finished no step and no shard; resubmit with a longer --time"),
        (STOPPED | {"step": 4}, {}, BEGAN, RESTART | {"is_preempted": True}, "stopped and requeued (restart 2"),
        (IN_REFERENCE_PASS, STOPPED | {"shards": 1}, {}, RESTART, "this restart finished no step and no shard"),
        (IN_REFERENCE_PASS, {"step": 0, "shards": 1}, {}, RESTART, "stopped and requeued (restart 2"),
        (IN_REFERENCE_PASS, {"step": 0, "shards": 2}, {}, RESTART, "this restart finished no step and no shard"),
        (STOPPED, {}, BEGAN, {"restarts": 20}, "restarted 20 times, MAX_REQUEUES=20; resubmit to resume"),
        (STOPPED | {"for_good": True}, {}, BEGAN, {}, "stopped, not requeued: stopped for good; resubmit to resume"),
        (STOPPED, {}, BEGAN, {"state": "COMPLETING"}, "Slurm is ending the job (COMPLETING), as after scancel"),
        (STOPPED, {}, BEGAN, {"state": ""}, "Slurm is ending the job (no answer)"),
        ({}, {}, {}, NOT_BEGUN, "stopped and requeued (restart 1 of at most 20)"),
        (STOPPED, STOPPED, BEGAN, NOT_BEGUN | RESTART, "this restart finished no step and no shard"),
        (STOPPED, STOPPED, BEGAN, NOT_BEGUN | RESTART | {"is_preempted": True}, "stopped and requeued (restart 2"),
        ({}, {}, {}, {"launcher_code": 69, "is_preempted": True}, "stopped and requeued (restart 1 of at most 20)"),
        (HUNG, {}, {"hangs": HANGS}, RESTART, "hung and requeued (restart 2 of at most 20); to exclude node n1,"),
        (HUNG | {"host": None}, {}, {}, {}, "hung and requeued (restart 1 of at most 20)"),
        (HUNG, {}, {"hangs": [*HANGS, HUNG]}, RESTART, "3 hangs in this job; resubmit to resume from checkpoint-6"),
        (HUNG | {"checkpoint": None}, {}, {}, {}, "it has no checkpoint; resubmit to start again"),
        (HUNG, {}, {}, {"max_requeues": 0}, "restarted 0 times, MAX_REQUEUES=0; resubmit to resume"),
    ],
)
def test_a_stop_or_a_hang_is_requeued_within_limits(status, before, environment, job, line):
    decision = end(status, before, environment, **job)
    assert line in decision.requeue_line and "None" not in decision.requeue_line
    assert decision.requeue == ("requeued (restart" in line) != ("not requeued: " in decision.requeue_line)
    assert decision.exit_code == (70 if status is HUNG or "host" in status else 75)


@pytest.mark.parametrize(
    ("status", "launcher_code", "state", "code", "rest"),
    [
        ({"state": "done", "exit_code": 0, "step": 4}, 0, "done", 0, "step 4, outputs/r"),
        ({"state": "failed", "exit_code": 2, "message": "no\nfile"}, 0, "failed", 2, "outputs/r: no file"),
        ({"state": "stopped", "exit_code": 0, "step": 0}, 0, "stopped", 0, "step 0, outputs/r"),
        ({"state": "stopped", "exit_code": 130}, 1, "stopped", 130, "outputs/r"),
        ({"state": "collapsed", "exit_code": 4}, 0, "collapsed", 4, "outputs/r"),
        ({"state": "running", "exit_code": None}, 0, "died", 1, "outputs/r: the processes were killed "),
        ({"state": "running", "exit_code": None}, 137, "died", 137, "outputs/r: the processes were killed "),
        ({"job": "6"}, 69, "unknown", 69, "outputs/r: the node check failed, nothing"),
        ({"state": "done", "job": "6"}, 1, "unknown", 1, "outputs/r"),
    ],
)
def test_other_ends_are_final_and_the_last_line_names_them(status, launcher_code, state, code, rest):
    decision = end({"job": "7"} | status, launcher_code=launcher_code)
    assert decision.exit_code == code
    assert decision.last_line.startswith(f"ended: state {state}, exit code {code}, {rest}")
    assert not decision.requeue and not decision.requeue_line


SCONTROL = """#!/bin/bash
echo "$@" >>commands
[[ -e "answers-$1" ]] || { touch "answers-$1"; exit 1; }
case "$*" in
*"show job"*) echo "JobState=RUNNING StartTime=2026-01-02T00:00:00 PreemptTime=$PREEMPTED" ;;
requeue*) exit $REFUSED ;;
esac
"""


@pytest.mark.parametrize(("refused", "preempted"), [("0", "2026-01-02T00:10:00"), ("1", "None")])
def test_slurm_may_answer_late_or_refuse(tmp_path, monkeypatch, refused, preempted):
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write_status(tmp_path, State.STOPPED, 75, "before", step=3)
    before = (tmp_path / STATUS).read_text()
    write_status(tmp_path, State.HUNG, 70, "no rank moved", step=8, checkpoint="checkpoint-6", host="n1")
    (tmp_path / ENVIRONMENT).write_text(json.dumps({"hangs": [{"job": "7"}]}))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REFUSED": refused, "PREEMPTED": preempted}
    env |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "PYTHONPATH": str(ROOT), "MAX_REQUEUES": ""}
    command = [sys.executable, "-m", "sfm_dpo.cluster.after", ".", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | env, input=before, capture_output=True, text=True)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert describe_job(1).is_preempted == (preempted != "None")
    asked = (tmp_path / "commands").read_text().splitlines()
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert done.returncode == 70 and lines[-1] == "ended: state hung, exit code 70, step 8, .: no rank moved"
    if refused == "1":
        assert lines[:-1] == ["not requeued: Slurm refused; resubmit to resume"]
    else:
        assert lines[0].startswith("hung and requeued (restart 1 of at most 20); to exclude node n1, which hung: ")
    show = "--oneliner show job 5_2"
    assert asked[:5] == [show, show, "requeue 5_2", show, "requeue 5_2"]
