"""Stopped and requeued by real Slurm, with the real train_dpo.py: the run ends bitwise where it would have ended.

`SLURM_REHEARSAL=1 python -m pytest tests/slurm/test_requeue.py -k time_limit` also lets a time limit of two minutes
end each start, as docs/slurm.md describes for a cluster of one's own; it takes about ten minutes.
"""

import json
import os
from pathlib import Path

import pytest

from sfm_dpo.run.checkpoint import why_incomplete
from sfm_dpo.run.folder import read_status
from tests.slurm.jobs import CPU, log_of, overrides, stand_in, wait_for

STEPS = 40
# The recipe's speed flags are on: padding-free, cached reference, balanced batches, under ZeRO-2 with two processes.
FIELDS = {"global_batch_size": 16, "max_steps": STEPS, "save_steps": 10, "logging_steps": 1}


def fields(run: str) -> dict:
    return FIELDS | {"output_dir": f"outputs/{run}"}


def submit(cluster, project, run: str, *options: str, **env: str) -> str:
    return cluster.sbatch(*options, "scripts/dpo_train.sh", *overrides(**fields(run)), cwd=project, **CPU | env)


def is_at(run: Path, step: int, restart: int, project: Path, job: str):
    """Whether start number `restart` of the job has done this step."""

    def reached() -> bool:
        status = read_status(run) or {}
        if status.get("state") in ("done", "failed"):
            raise AssertionError(f"{status}\n{log_of(project, job)[-3000:]}")
        running = status.get("state") == "running" and (status.get("step") or 0) >= step
        return running and f"(restart {restart})" in log_of(project, job)

    return reached


def history(run: Path) -> list[dict]:
    entries = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in e.items() if not k.startswith("perf/")} for e in entries if "loss" in e]


def assert_same(run: Path, whole: Path) -> None:
    assert [e["step"] for e in history(run)] == list(range(1, STEPS + 1))
    assert history(run) == history(whole)
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(cluster, project) -> tuple[str, Path]:
    """A job that nobody interrupts; it runs beside the first of the tests, on the other node."""
    return submit(cluster, project, "whole"), project / "outputs/whole"


@pytest.mark.timeout(900)
def test_each_way_to_stop_requeues_and_the_run_ends_as_if_nobody_had_stopped_it(cluster, project, whole):
    """The time limit's USR1 and a person's STOP: one job, three starts. TERM: test_submit.py, and the next two."""
    job, run = submit(cluster, project, "stopped"), project / "outputs/stopped"
    ways = [
        lambda: cluster.run("scancel", "--signal=USR1", "--batch", job),
        lambda: (run / "STOP").touch(),
    ]
    for restart, stop in enumerate(ways):
        wait_for(is_at(run, 4 + 10 * restart, restart, project, job), 240)
        stop()
    record = cluster.wait(job, 300)
    log = log_of(project, job)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("COMPLETED", "0:0", "2"), log[-3000:]
    assert log.count("asked to stop: outputs/stopped/STOP") == 1
    assert log.count("ended: state stopped, exit code 75, step ") == 2
    assert [f"stopped and requeued (restart {n} of at most 20)" in log for n in (1, 2)] == [True] * 2
    assert log.count("resuming from outputs/stopped/checkpoint-") == 2
    assert log.endswith(f"ended: state done, exit code 0, step {STEPS}, outputs/stopped\n")

    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [(s["job"], s["restart"]) for s in starts] == [(job, None)] + [(job, str(n)) for n in (1, 2)]
    steps = [s["step"] for s in starts]
    assert steps[0] == 0 and steps == sorted(set(steps)), steps
    assert cluster.wait(whole[0], 300)["JobState"] == "COMPLETED"
    assert_same(run, whole[1])


def test_scancel_without_options_saves_and_is_not_requeued(cluster, project):
    """It sends TERM to every process but the batch script, and KILL ten seconds later here (KillWait)."""
    job, run = submit(cluster, project, "cancelled"), project / "outputs/cancelled"
    wait_for(is_at(run, 3, 0, project, job), 240)
    cluster.run("scancel", job)
    record = cluster.wait(job, 60)
    log = log_of(project, job)
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "0"), log[-3000:]
    status = read_status(run)
    assert status["state"] == "stopped", log[-3000:]
    assert why_incomplete(project / status["checkpoint"]) is None
    assert "requeued (restart" not in log


@pytest.mark.grid
def test_preempted_job_saves_and_comes_back_when_the_urgent_one_is_through(cluster, project, whole):
    """PreemptMode=REQUEUE: Slurm sends TERM; after the partition's GraceTime, 90 s here, it would kill and requeue."""
    run = project / "outputs/preempted"
    job = submit(cluster, project, "preempted", "--nodelist=n1", "--exclusive")
    wait_for(is_at(run, 5, 0, project, job), 240)
    urgent = cluster.sbatch("--partition=urgent", "--nodelist=n1", "--exclusive", "--wrap=true", cwd=project)
    assert cluster.wait(urgent, 60)["JobState"] == "COMPLETED", log_of(project, job)[-3000:]
    record = cluster.wait(job, 240)
    log = log_of(project, job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), log[-3000:]
    assert "stopped and requeued (restart 1 of at most 20)" in log
    assert "resuming from outputs/preempted/checkpoint-" in log
    cluster.wait(whole[0], 300)
    assert_same(run, whole[1])


STUCK = """
import os
from sfm_dpo.run.folder import write_status

shards = min(2, 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")))
write_status("outputs/stuck", "stopped", 75, "stopped during the reference pass", step=0, shards=shards)
"""


def test_a_job_that_gets_nowhere_is_not_requeued_for_ever(cluster, project, tmp_path):
    """Its first restart does another shard of the reference pass, its second does nothing: that one is the last."""
    folder = stand_in(project, tmp_path, STUCK, fields("stuck"))
    job = submit(cluster, folder, "stuck", NUM_PROCESSES="1")
    record = cluster.wait(job, 240)
    log = log_of(folder, job)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "75:0", "2"), log
    assert log.count("stopped and requeued") == 2
    assert "stopped, not requeued: this restart did no step and no shard" in log


CHAINED = """
from sfm_dpo.run.folder import read_status, write_status

if read_status("outputs/chain"):
    write_status("outputs/chain", "done", 0, step=4)
else:
    write_status("outputs/chain", "stopped", 75, "stopped on request", step=2)
"""


def test_a_chain_does_what_requeue_does(cluster, project, tmp_path):
    """--array=1-3%1: the first task stops, the second goes on and is done, the third finds nothing to do."""
    folder = stand_in(project, tmp_path, CHAINED, fields("chain"))
    job = submit(cluster, folder, "chain", "--array=1-3%1", NUM_PROCESSES="1", MAX_REQUEUES="0")
    ends = [cluster.wait(f"{job}_{task}", 120) for task in (1, 2, 3)]
    assert [(e["JobState"], e["ExitCode"], e["Restarts"]) for e in ends] == [
        ("FAILED", "75:0", "0"),
        ("COMPLETED", "0:0", "0"),
        ("COMPLETED", "0:0", "0"),
    ]
    logs = [log_of(folder, e["JobId"]) for e in ends]
    assert "not requeued: restarted 0 times, MAX_REQUEUES=0; submit again to go on" in logs[0]
    assert "ended: state done, exit code 0, step 4" in logs[1]
    assert "already done" in logs[2]


@pytest.mark.skipif(os.environ.get("SLURM_REHEARSAL") != "1", reason="ten minutes; SLURM_REHEARSAL=1 runs it")
@pytest.mark.timeout(1500)
def test_time_limit_of_two_minutes_needs_several_starts(cluster, project):
    """Nobody sends a signal but Slurm. It may do so up to 30 s early, so 40 s of lead are 40 to 70 s."""
    options = ("--time=2", "--signal=B:USR1@40")
    longer = {"max_steps": 600, "save_steps": 200}
    ends = {}
    for name, extra in (("limited", options), ("unlimited", ())):
        arguments = overrides(**fields(name) | longer)
        env = CPU | {"STOP_LEAD_SECONDS": "40"}
        job = cluster.sbatch(*extra, "scripts/dpo_train.sh", *arguments, cwd=project, **env)
        ends[name] = cluster.wait(job, 1200)
        assert ends[name]["JobState"] == "COMPLETED", log_of(project, job)[-3000:]
    assert int(ends["limited"]["Restarts"]) >= 2
    assert ends["unlimited"]["Restarts"] == "0"
    limited, unlimited = (project / f"outputs/{name}" for name in ("limited", "unlimited"))
    assert history(limited) == history(unlimited)
    assert (limited / "model.safetensors").read_bytes() == (unlimited / "model.safetensors").read_bytes()
    print([(s["time"], s["step"]) for s in json.loads((limited / "environment.json").read_text())["starts"]])
