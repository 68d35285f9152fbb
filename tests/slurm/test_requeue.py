"""Stopped and requeued by real Slurm, with the real train_dpo.py: the run ends bitwise where it would have ended."""

import os
import re
from pathlib import Path

import psutil
import pytest

from sfm_dpo.run.checkpoint import why_incomplete
from sfm_dpo.run.folder import read_file, read_status
from tests.slurm.jobs import CPU, end_of, log_of, stand_in, train
from tests.toolbox import logged, wait_for

pytestmark = pytest.mark.slurm
STEPS = 40
# The recipe's speed flags are on: padding-free, cached reference, balanced batches, under ZeRO-2 with two processes.
FIELDS = {"global_batch_size": 16, "max_steps": STEPS, "save_steps": 10, "logging_steps": 1}
ONE = {"NUM_PROCESSES": "1"}


def submit(cluster, project, run: str, *options: str, env: dict[str, str] | None = None, **fields) -> str:
    return train(cluster, project, *options, env=env, **FIELDS | {"output_dir": f"outputs/{run}"} | fields)


def wait_for_step(run: Path, step: int, restart: int, project: Path, job: str) -> None:
    """Waits until start number `restart` of the job has done this step."""

    def reached() -> bool:
        status = read_status(run) or {}
        assert status.get("state") not in ("done", "failed"), f"{status}\n{log_of(project, job)[-3000:]}"
        running = status.get("state") == "running" and (status.get("step") or 0) >= step
        return running and f"(restart {restart})" in log_of(project, job)

    wait_for(reached, 1800)


def assert_same(run: Path, expected: Path) -> None:
    assert logged(run) == logged(expected)
    assert (run / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(cluster, project) -> tuple[str, Path]:
    """A job that nobody interrupts; it runs beside the first of the tests, on the other node."""
    return submit(cluster, project, "uninterrupted"), project / "outputs/uninterrupted"


def test_each_way_to_stop_requeues_and_the_run_ends_as_if_nobody_had_stopped_it(cluster, project, uninterrupted):
    """The time limit's USR1 and a person's STOP: one job, three starts. TERM: the next two."""
    job = submit(cluster, project, "stopped")
    run = project / "outputs/stopped"
    wait_for_step(run, 4, 0, project, job)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    wait_for_step(run, 14, 1, project, job)
    (run / "STOP").touch()
    log = end_of(cluster, project, job, restarts=2)
    assert log.count("asked to stop: outputs/stopped/STOP") == 1
    assert log.count("ended: state stopped, exit code 75, step ") == 2
    assert all(f"stopped and requeued (restart {n} of at most 20)" in log for n in (1, 2))
    assert log.count("resuming from outputs/stopped/checkpoint-") == 2
    assert log.endswith(f"ended: state done, exit code 0, step {STEPS}, outputs/stopped\n")

    starts = read_file(run / "environment.json")["starts"]
    assert [(s["job"], s["restart"]) for s in starts] == [(job, None), (job, "1"), (job, "2")]
    steps = [s["step"] for s in starts]
    assert steps[0] == 0 and steps == sorted(set(steps)), steps
    end_of(cluster, project, uninterrupted[0])
    assert [e["step"] for e in logged(run)] == list(range(1, STEPS + 1))
    assert_same(run, uninterrupted[1])


@pytest.mark.grid
def test_with_the_optimizer_on_the_host_a_killed_and_requeued_run_is_bitwise_that_of_zero2(cluster, project):
    """In bf16, in which DeepSpeed sums gradients in fp32."""
    whole = submit(cluster, project, "bf16", bf16="true")
    job = submit(cluster, project, "offload", env={"LAUNCH": "cpu_offload"}, bf16="true")
    run = project / "outputs/offload"
    wait_for_step(run, 12, 0, project, job)
    commands = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    ranks = [process for process, words in commands if "train_dpo.py" in words[:3] and "outputs/offload" in words]
    assert len(ranks) == 2, commands
    for rank in ranks:
        rank.kill()
    assert cluster.wait(job, 600)["JobState"] == "FAILED", log_of(project, job)[-3000:]
    cluster.run("scontrol", "requeue", job)
    log = end_of(cluster, project, job, restarts=1)
    assert "resuming from outputs/offload/checkpoint-10" in log
    end_of(cluster, project, whole)
    assert_same(run, project / "outputs/bf16")


def test_scancel_without_options_saves_and_is_not_requeued(cluster, project):
    """It sends TERM to every process but the batch script, and KILL ten seconds later here (KillWait)."""
    job = submit(cluster, project, "cancelled")
    run = project / "outputs/cancelled"
    wait_for_step(run, 3, 0, project, job)
    cluster.run("scancel", job)
    record = cluster.wait(job, 600)
    log = log_of(project, job)
    assert (record["JobState"], record["Restarts"]) == ("CANCELLED", "0"), log[-3000:]
    status = read_status(run)
    assert status["state"] == "stopped", log[-3000:]
    assert why_incomplete(project / status["checkpoint"]) is None
    assert "requeued (restart" not in log


@pytest.mark.grid
def test_preempted_job_saves_and_comes_back_when_the_urgent_one_is_through(cluster, project, uninterrupted):
    """PreemptMode=REQUEUE: Slurm sends TERM; after the partition's GraceTime, 90 s here, it would kill and requeue."""
    run = project / "outputs/preempted"
    job = submit(cluster, project, "preempted", "--nodelist=n1", "--exclusive")
    wait_for_step(run, 5, 0, project, job)
    urgent = cluster.sbatch("--partition=urgent", "--nodelist=n1", "--exclusive", "--wrap=true", cwd=project)
    assert cluster.wait(urgent, 600)["JobState"] == "COMPLETED", log_of(project, job)[-3000:]
    log = end_of(cluster, project, job, restarts=1)
    assert "stopped and requeued (restart 1 of at most 20)" in log
    assert "resuming from outputs/preempted/checkpoint-" in log
    end_of(cluster, project, uninterrupted[0])
    assert_same(run, uninterrupted[1])


WHERE = {  # by phase of a run, what its log then says; "folder": what is in its folder
    "node check": "rendezvous",
    "loading": "folder: .lock",
    "reference pass": "reference log-probs of",
    "preflight": "largest micro-batch has",
    "step": "step 2/",
    "evaluation": "step 4/",
    "saving": "folder: checkpoint-5",
    "final save": "folder: config.json",
    "report": "step 8/",
}
EVALUATED = {"max_steps": 8, "save_steps": 5, "global_batch_size": 4}
EVALUATED |= {"eval_fraction": 0.25, "eval_strategy": "steps", "eval_steps": 4}


@pytest.fixture(scope="module")
def whole(cluster, project) -> Path:
    """A run of one process, which is evaluated and which nobody interrupts."""
    end_of(cluster, project, submit(cluster, project, "whole", env=ONE, **EVALUATED))
    return project / "outputs/whole"


@pytest.mark.skipif("FAULTS" not in os.environ, reason="a minute each; FAULTS=100 runs them")
@pytest.mark.parametrize("phase", WHERE)
def test_a_signal_is_obeyed_in_each_phase_or_comes_too_late(cluster, project, whole, phase):
    job = submit(cluster, project, f"in {phase}", env=ONE | {"SKIP_HEALTHCHECK": "0"}, **EVALUATED)
    run = project / f"outputs/in {phase}"
    log = project / f"logs/dpo-train-{job}.out"
    sign = WHERE[phase]
    file = run / sign.removeprefix("folder: ")
    wait_for(lambda: file.exists() or (log.exists() and sign in log.read_text()), 600, every=0.002)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    restarts = int(cluster.wait(job, 1800)["Restarts"])
    text = end_of(cluster, project, job, restarts=restarts)
    ends = re.findall("ended: (.*)", text)
    print(f"| {phase} | {restarts} restart(s) | {' | '.join(ends)} |", flush=True)
    assert ends[-1] == f"state done, exit code 0, step 8, outputs/in {phase}"
    assert restarts == text.count("stopped and requeued") == len(ends) - 1 and "Traceback" not in text
    assert_same(run, whole)


# Stand-ins for train_dpo.py, which end as a run may end
STUCK = """
import os
from sfm_dpo.run.folder import write_status

shards = min(2, 1 + int(os.environ.get("SLURM_RESTART_COUNT", "0")))
write_status("outputs/stuck", "stopped", 75, "stopped during the reference pass", step=0, shards=shards)
"""


def test_a_job_that_gets_nowhere_is_not_requeued_for_ever(cluster, project, tmp_path):
    """Its first restart does another shard of the reference pass, its second does nothing: that one is the last."""
    folder = stand_in(project, tmp_path, STUCK, FIELDS | {"output_dir": "outputs/stuck"})
    job = submit(cluster, folder, "stuck", env=ONE)
    log = end_of(cluster, folder, job, "FAILED", "75:0", restarts=2)
    assert log.count("stopped and requeued") == 2
    assert "stopped, not requeued: this restart finished no step and no shard" in log


SLOW_CHECK = "[[ -z ${SLURM_STEP_ID:-} || -e checking ]] || { touch checking; sleep 120; }\n"
EXPORTED = """
import os
from sfm_dpo.run.folder import write_status

assert os.environ["NUM_PROCESSES"] == "1" and "MAX_REQUEUES" not in os.environ
write_status("outputs/checked", "done", 0, step=4)
"""


@pytest.mark.parametrize("how", ["USR1", pytest.param("preempted", marks=pytest.mark.grid)])
def test_a_stop_during_the_node_check_requeues(cluster, project, tmp_path, how):
    """Of sbatch's environment the job has only what --export names, or nothing (SBATCH_EXPORT=NONE; site.sh sets the
    rest), and the nodes have all that the job has."""
    folder = stand_in(project, tmp_path, EXPORTED, FIELDS | {"output_dir": "outputs/checked"})
    named = [f"{name}={value}" for name, value in (CPU | ONE).items() if name != "SKIP_HEALTHCHECK"]
    alone = ["--nodelist=n1", "--exclusive"]
    env = {"MAX_REQUEUES": "7"}
    if how == "USR1":
        (folder / "scripts/site.sh").write_text(SLOW_CHECK)
        job = submit(cluster, folder, "checked", f"--export={','.join(named)}", *alone, env=env)
    else:
        (folder / "scripts/site.sh").write_text(f"export {' '.join(named)}\n{SLOW_CHECK}")
        job = submit(cluster, folder, "checked", *alone, env=env | {"SBATCH_EXPORT": "NONE"})
    wait_for((folder / "checking").exists, 600)
    if how == "USR1":
        cluster.run("scancel", "--signal=USR1", "--batch", job)
    else:
        cluster.sbatch("--partition=urgent", *alone, "--wrap=true", cwd=project)
    log = end_of(cluster, folder, job, restarts=1)
    assert "stopped and requeued (restart 1 of at most 20)" in log
    assert "ended: state stopped, exit code 75, outputs/checked: asked to stop before training began" in log
    assert "1 rank(s) are healthy" in log and log.endswith("ended: state done, exit code 0, step 4, outputs/checked\n")


HANGS = """
import json, os, pathlib
from sfm_dpo.run.folder import read_file
from sfm_dpo.run.folder import ENVIRONMENT, write_status

run = pathlib.Path("outputs/hangs")
start = read_file(run / ENVIRONMENT)
host, job = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"]
start["hangs"] = [*start.get("hangs", []), {"step": 3, "rank": 0, "host": host, "job": job}]
(run / ENVIRONMENT).write_text(json.dumps(start))
write_status(run, "hung", 70, "no rank has moved", step=3, checkpoint="checkpoint-2", host=host, rank=0)
"""


def test_a_hang_is_requeued_twice_and_its_node_is_named(cluster, project, tmp_path):
    """The stand-in writes what the watchdog would."""
    folder = stand_in(project, tmp_path, HANGS, {"output_dir": "outputs/hangs"})
    job = train(cluster, folder, env=ONE, output_dir="outputs/hangs")
    log = end_of(cluster, folder, job, "FAILED", "70:0", restarts=2)
    assert all(f"hung and requeued (restart {n} of at most 20)" in log for n in (1, 2))
    assert "hung, not requeued: 3 hangs in this job; resubmit to resume from checkpoint-2" in log
    hosts = [hang["host"] for hang in read_file(folder / "outputs/hangs/environment.json")["hangs"]]
    assert len(hosts) == 3, log
    assert f"to exclude node {hosts[0]}, which hung: scontrol update JobId={job} ExcNodeList={hosts[0]}\n" in log
    assert log.endswith("ended: state hung, exit code 70, step 3, outputs/hangs: no rank has moved\n")
