"""The batch scripts, submitted with real sbatch to the local Slurm: a tiny model on CPU instead of 7B on 4 GPUs."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from sfm_dpo.config import parse_config
from tests.commands import runnable
from tests.project import link
from tests.slurm.jobs import CPU, log_of, overrides, stand_in, wait_for


@pytest.fixture(scope="module")
def jobs(cluster, project) -> dict[str, str]:
    """Both scripts as a user submits them, think on one node and instruct on two; four ranks each."""
    return {
        "think": cluster.sbatch("scripts/dpo_train.sh", cwd=project, **CPU | {"NUM_PROCESSES": "4"}),
        "instruct": cluster.sbatch(
            "--nodes=2",
            "scripts/dpo_instruct_train.sh",
            *overrides(output_dir="outputs/two nodes"),
            cwd=project,
            **CPU | {"NUM_PROCESSES": "2", "SKIP_HEALTHCHECK": "0"},
        ),
    }


@pytest.mark.parametrize(
    ("which", "name", "output"),
    [("think", "dpo-train", "outputs/dpo"), ("instruct", "dpo-instruct-train", "outputs/two nodes")],
)
def test_job_trains_and_saves(cluster, project, jobs, which, name, output):
    record = cluster.wait(jobs[which], 240)
    log = log_of(project, jobs[which], name)
    assert record["JobState"] == "COMPLETED", log[-3000:]
    assert record["JobName"] == name

    run = project / output
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 4)
    assert status["job"] == jobs[which]
    for file in ("model.safetensors", "tokenizer.json", "resolved_config.yaml", "environment.json"):
        assert (run / file).is_file(), sorted(p.name for p in run.iterdir())
    assert json.loads((run / "environment.json").read_text())["world_size"] == 4
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)

    assert f"job {jobs[which]} (restart 0) on n" in log
    assert re.search(rf"ended: state done, exit code 0, step 4, {output}\n$", log), log[-3000:]


def test_two_nodes_train_as_one(cluster, project, jobs):
    """Two nodes of two processes and one node of four are the same run. Nodes that train alone see other pairs."""
    for job in jobs.values():
        cluster.wait(job, 240)
    one, two = (
        json.loads((project / run / "trainer_state.json").read_text())["log_history"][:4]
        for run in ("outputs/dpo", "outputs/two nodes")
    )
    for metric in ("loss", "logps/chosen", "logps/rejected", "grad_norm"):
        assert [e[metric] for e in one] == pytest.approx([e[metric] for e in two], rel=1e-4), metric
    assert one[-1]["loss"] < 0.69
    assert "health: 2 node(s), 4 rank(s) fine" in log_of(project, jobs["instruct"], "dpo-instruct-train")


def test_unhealthy_nodes_end_the_job_with_a_code_of_their_own(cluster, project):
    env = CPU | {"SKIP_HEALTHCHECK": "0", "NUM_PROCESSES": "1", "HF_HOME": "/proc/huggingface"}
    command = ["--nodes=2", "scripts/dpo_train.sh", *overrides(output_dir="outputs/unhealthy")]
    job = cluster.sbatch(*command, cwd=project, **env)
    record = cluster.wait(job, 120)
    log = log_of(project, job)
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "69:0"), log[-3000:]
    for node in ("n1", "n2"):
        assert f"unhealthy {node}: HF_HOME /proc/huggingface cannot be written: " in log
    assert "submit again with --exclude=n1,n2, or SKIP_HEALTHCHECK=1 to train anyway" in log
    assert "nothing was trained" in log.splitlines()[-1]


def test_finished_run_is_not_trained_again(cluster, project, jobs):
    cluster.wait(jobs["think"], 240)
    before = (project / "outputs/dpo/model.safetensors").stat().st_mtime_ns
    job = cluster.sbatch("scripts/dpo_train.sh", cwd=project, **CPU)
    assert cluster.wait(job, 60)["JobState"] == "COMPLETED"
    assert "outputs/dpo: already done" in log_of(project, job).splitlines()[-1]
    assert (project / "outputs/dpo/model.safetensors").stat().st_mtime_ns == before


def test_two_jobs_at_once_in_one_folder(cluster, project):
    """One has the folder, and trains; the other ends with code 2 and says in a line who has it."""
    runs = [
        cluster.sbatch(
            f"--nodelist={node}",
            "scripts/dpo_train.sh",
            *overrides(output_dir="outputs/contested", learning_rate=rate),
            cwd=project,
            **CPU | {"NUM_PROCESSES": "1"},
        )
        for node, rate in (("n1", 1e-4), ("n2", 2e-4))
    ]
    codes = {job: cluster.wait(job, 240)["ExitCode"] for job in runs}
    assert sorted(codes.values()) == ["0:0", "2:0"], [log_of(project, job)[-3000:] for job in runs]
    winner, other = sorted(codes, key=codes.get)
    run = project / "outputs/contested"
    assert json.loads((run / "status.json").read_text())["job"] == winner
    resolved = yaml.safe_load((run / "resolved_config.yaml").read_text())
    assert resolved["learning_rate"] == (1e-4 if winner == runs[0] else 2e-4)
    assert len(json.loads((run / "environment.json").read_text())["starts"]) == 1
    assert not (run / ".lock").exists()
    line = f"^error: output_dir outputs/contested: job {winner} on .* has it since .*; wait, .*$"
    assert re.search(line, log_of(project, other), re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in runnable("sbatch|for") if "..." not in line])
def test_documented(cluster, project, line, monkeypatch):
    """The sbatch lines of the documentation: what Slurm thinks of them, and train_dpo.py of their fields.

    Those without options are `jobs`; the one for CPU nodes is run here.
    """
    monkeypatch.chdir(project)
    link(project, "SMALL_MODEL", "tiny model")
    link(project, "pairs.jsonl", "pairs/train.jsonl")
    if line.startswith("LAUNCH=cpu sbatch scripts/dpo"):
        env = CPU | {"NUM_PROCESSES": "1"}
        said = cluster.run("bash", "-c", line.replace("sbatch", "sbatch --parsable"), cwd=project, **env)
        assert cluster.wait(said, 240)["JobState"] == "COMPLETED", log_of(project, said)[-3000:]
        assert "ended: state done, exit code 0, step 2, outputs/rehearsal" in log_of(project, said)
        return
    cluster.run("bash", "-c", line.replace("sbatch", "sbatch --test-only"), cwd=project)
    if "scripts/evaluate.sh" in line or "check_gpu" in line:
        return
    script, arguments = re.search(r"scripts/(\w+)\.sh([^;]*)", line).groups()
    recipe = {"dpo_train": "think", "dpo_instruct_train": "instruct"}[script]
    shutil.copy(project / "recipes" / "think.yaml", project / "recipes" / "mine.yaml")
    config = parse_config(["--config", f"recipes/{recipe}.yaml", *shlex.split(arguments), "--use_cpu"])
    assert config.train.output_dir.startswith("outputs/")


@pytest.mark.parametrize(
    ("script", "name", "recipe"),
    [("dpo_train.sh", "dpo-train", "think"), ("dpo_instruct_train.sh", "dpo-instruct-train", "instruct")],
)
def test_header(cluster, project, script, name, recipe):
    """What Slurm made of the header, not what the header says."""
    job = cluster.sbatch("--hold", f"scripts/{script}", cwd=project)
    record = cluster.show(job)
    cluster.run("scancel", job)
    expected = {
        "JobName": name,
        "NumNodes": "1-1",
        "TresPerNode": "gres:gpu:4",
        "CPUs/Task": "32",
        "MinMemoryNode": "500G",
        "TimeLimit": "1-00:00:00",
        "Requeue": "1",
    }
    assert {key: record[key] for key in expected} == expected
    assert cluster.run("scontrol", "show", "job", job).count(f"{project}/logs/{name}-{job}.out") == 2  # out and err
    text = (project / "scripts" / script).read_text()
    assert f"run_dpo recipes/{recipe}.yaml" in text
    assert "#SBATCH --open-mode=append" in text  # Slurm does not show it


@pytest.mark.parametrize(
    ("options", "env", "arguments", "message"),
    [
        ([], CPU, ["--lerning_rate", "1"], "error: unknown option --lerning_rate; did you mean --learning_rate?"),
        ([], CPU, ["--config", "recipes/thinking.yaml"], "error: --config recipes/thinking.yaml: no such file"),
        ([], CPU | {"LAUNCH": "zero9"}, [], "error: LAUNCH=zero9: no configs/accelerate/zero9.yaml; choose one of: "),
        (["--gpus-per-node=0"], {"VENV": sys.prefix}, [], "error: processes per node is ''"),
        ([], CPU | {"VENV": "nowhere"}, [], "error: VENV=nowhere: no accelerate in its bin folder"),
        # found by train_dpo.py, after the launch: rank 0 tells the other
        ([], CPU | {"NUM_PROCESSES": "2"}, ["--dataset_name", "missing.jsonl"], "missing.jsonl"),
    ],
    ids=["field", "recipe", "launch", "gpus", "venv", "data"],
)
def test_mistake_ends_the_job_with_code_2_and_one_line(cluster, project, options, env, arguments, message):
    command = [*options, "scripts/dpo_train.sh", *overrides(output_dir="outputs/mistake"), *arguments]
    job = cluster.sbatch(*command, cwd=project, **{"NUM_PROCESSES": "1"} | env)
    record = cluster.wait(job, 120)
    log = log_of(project, job)
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "2:0"), log[-3000:]
    assert message in log.strip().splitlines()[-1]
    if "missing" in message:
        assert sum(line.startswith("error: ") for line in log.splitlines()) == 1, log[-3000:]
    assert "Traceback" not in log


@pytest.mark.grid
def test_eval_tasks_are_evaluated_by_a_job_of_their_own(cluster, project):
    """One that fails leaves the trained model as it was; of a training that fails nothing is evaluated."""
    rows = [{"question": f"What is {i} and {i}?", "choices": [f"{2 * i}.", "No."]} for i in range(8)]
    (project / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "sums.yaml").write_text("""\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: 0
metric_list: [{metric: acc, higher_is_better: true}]
""")
    env = CPU | {"NUM_PROCESSES": "1", "EVAL_OPTIONS": "--gpus-per-node=0 --time=0:20:00"}

    def train(name: str, tasks: str, **fields) -> tuple[str, str]:
        """The ids of the training's job and of the one that it submitted."""
        fields |= {"output_dir": f"outputs/{name}", "eval_tasks": tasks}
        job = cluster.sbatch("scripts/dpo_train.sh", *overrides(**fields), cwd=project, **env)
        ended = cluster.wait(job, 240)
        assert (ended["JobState"] == "COMPLETED") == ("dataset_name" not in fields), log_of(project, job)[-3000:]
        return job, re.search(r"evaluation: job (\d+) follows this one", log_of(project, job))[1]

    _, good = train("evaluated", "sums.yaml")
    _, bad = train("not_evaluated", "nothing.yaml")
    _, never = train("failed", "sums.yaml", dataset_name="missing.jsonl")
    assert cluster.wait(good, 240)["TimeLimit"] == "00:20:00"
    (row,) = json.loads((project / "outputs/evaluated/evaluation.json").read_text())["benchmarks"]
    assert (row["task"], row["metric"], row["samples"]) == ("sums", "acc", 8)
    assert cluster.wait(bad, 120)["ExitCode"] == "2:0"
    assert "nothing.yaml: lm-eval knows no such task" in log_of(project, bad, "evaluate")
    for run in ("evaluated", "not_evaluated"):
        assert json.loads((project / f"outputs/{run}/status.json").read_text())["state"] == "done"
    assert cluster.wait(never, 120)["JobState"] == "CANCELLED"


def test_submitted_from_another_folder(cluster, project, tmp_path):
    (tmp_path / "logs").mkdir()
    job = cluster.sbatch(str(project / "scripts/dpo_train.sh"), cwd=tmp_path)
    assert cluster.wait(job, 60)["ExitCode"] == "2:0"
    expected = f"error: {tmp_path} is not the project folder; cd there and run: sbatch scripts/dpo_train.sh\n"
    assert log_of(tmp_path, job) == expected


ENDS = """
import os, pathlib, signal, sys, time
from sfm_dpo.run.folder import write_status

run = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
write_status(run, "running", step=3)
if os.environ.get("KILLED"):
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":  # the first start waits for the batch script's signal
    while not (run / "STOP").exists():
        time.sleep(0.1)
    (run / "STOP").unlink()
write_status(run, "stopped", 75, "stopped on request", step=3)
"""


@pytest.fixture(scope="module")
def ends(project, tmp_path_factory) -> Path:
    runs = ({"output_dir": f"outputs/{name}"} for name in ("stops", "killed"))
    return stand_in(project, tmp_path_factory.mktemp("stand-in"), ENDS, *runs)


def test_signal_stops_the_run_and_requeues_it_at_most_max_requeues_times(cluster, ends):
    command = ["scripts/dpo_train.sh", *overrides(output_dir="outputs/stops")]
    job = cluster.sbatch(*command, cwd=ends, **CPU, NUM_PROCESSES="1", MAX_REQUEUES="1")
    wait_for(lambda: (ends / "outputs/stops/status.json").exists(), 60)
    cluster.run("scancel", "--signal=TERM", "--batch", job)
    record = cluster.wait(job, 120)
    log = log_of(ends, job)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "75:0", "1"), log
    assert "asked to stop: outputs/stops/STOP" in log
    assert "stopped and requeued (restart 1 of at most 1)" in log
    assert f"job {job} (restart 1)" in log
    assert "stopped, not requeued: restarted 1 times, MAX_REQUEUES=1" in log
    assert log.endswith("ended: state stopped, exit code 75, step 3, outputs/stops: stopped on request\n")


def test_killed_run_is_not_taken_for_a_good_one_nor_requeued(cluster, ends):
    command = ["scripts/dpo_train.sh", *overrides(output_dir="outputs/killed")]
    job = cluster.sbatch(*command, cwd=ends, **CPU, NUM_PROCESSES="1", KILLED="1")
    record = cluster.wait(job, 120)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "1:0", "0")
    log = log_of(ends, job)
    assert "error: rank 0 on " in log and "Traceback" not in log
    assert "ended: state failed, exit code 1, step 3" in log.splitlines()[-1]
    assert "was killed by SIGKILL" in log.splitlines()[-1]
