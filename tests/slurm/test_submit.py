"""The batch scripts, submitted with real sbatch to the local Slurm: a tiny model on CPU instead of 7B on 4 GPUs."""

import json
import os
import re
import shlex
import shutil

import evaluate
import pytest

from sfm_dpo.config.fields import parse_config
from sfm_dpo.run.folder import read_status
from tests.commands import runnable
from tests.project import link
from tests.slurm.jobs import CPU, end_of, log_of, stand_in, train
from tests.toolbox import error_line, logged, write_jsonl, write_task

pytestmark = pytest.mark.slurm
INSTRUCT = "dpo-instruct-train"


def test_both_scripts_train_and_two_nodes_train_as_one(cluster, project):
    """Two nodes of one process and one node of two are the same run. Nodes that train alone see other pairs."""
    two_nodes = ["--nodes=2", "scripts/dpo_instruct_train.sh", "--output_dir", "outputs/two nodes"]
    env = CPU | {"NUM_PROCESSES": "1", "SKIP_HEALTHCHECK": "0"}
    jobs = {
        "dpo-train": (train(cluster, project, env={"NUM_PROCESSES": "2"}), "outputs/dpo"),
        INSTRUCT: (cluster.sbatch(*two_nodes, cwd=project, **env), "outputs/two nodes"),
    }
    losses = []
    for name, (job, output) in jobs.items():
        log = end_of(cluster, project, job, name=name)
        run = project / output
        status = read_status(run)
        assert (status["state"], status["exit_code"], status["step"], status["job"]) == ("done", 0, 4, job)
        assert (run / "model.safetensors").is_file() and (run / "tokenizer.json").is_file()
        assert json.loads((run / "environment.json").read_text())["world_size"] == 2
        losses.append(logged(run))
        assert losses[-1][0]["loss"] == pytest.approx(0.6931, abs=1e-4)
        assert f"job {job} (restart 0) on n" in log
        assert re.search(rf"ended: state done, exit code 0, step 4, {output}\n$", log), log[-3000:]
    assert "node check: 2 node(s), 2 rank(s) are healthy" in log
    one, two = losses
    for metric in ("loss", "logps/chosen", "logps/rejected", "grad_norm"):
        assert [e[metric] for e in one] == pytest.approx([e[metric] for e in two], rel=1e-4), metric
    assert one[-1]["loss"] < 0.69


def test_unhealthy_nodes_end_the_job_with_a_code_of_their_own(cluster, project):
    env = {"SKIP_HEALTHCHECK": "0", "NUM_PROCESSES": "1", "HF_HOME": "/proc/huggingface"}
    job = train(cluster, project, "--nodes=2", env=env, output_dir="outputs/unhealthy")
    log = end_of(cluster, project, job, "FAILED", "69:0")
    for node in ("n1", "n2"):
        assert f"unhealthy {node}: HF_HOME /proc/huggingface cannot be written: " in log
    assert "correct this and submit again, or SKIP_HEALTHCHECK=1 to train anyway" in log and "--exclude" not in log
    assert "nothing was trained" in log.splitlines()[-1]


@pytest.mark.parametrize("line", runnable("sbatch") + runnable("sbatch", marked=True))
def test_documented(cluster, project, line, monkeypatch):
    """What Slurm thinks of the sbatch lines, and train_dpo.py of their fields; those for CPU nodes are run."""
    monkeypatch.chdir(project)
    line = line.replace("$rate", "8e-8").replace("$seed", "0")  # of the loop over sbatch
    link(project, "SMALL_MODEL", "tiny model")
    link(project, "pairs.jsonl", "pairs/train.jsonl")
    is_prepared = "prepare.sh prefetch.py" in line
    if is_prepared or (line.startswith("LAUNCH=cpu") and "scripts/dpo_train.sh" in line):
        command = line.replace("sbatch", "sbatch --parsable")
        job = cluster.run("bash", "-c", command, cwd=project, **CPU | {"NUM_PROCESSES": "1"})
        log = end_of(cluster, project, job, name="prepare" if is_prepared else "dpo-train")
        assert ("pairs to train on" if is_prepared else "state done, exit code 0, step 2, outputs/dry-run") in log
        return
    cluster.run("bash", "-c", line.replace("sbatch", "sbatch --test-only"), cwd=project)
    if "dpo_" not in line:
        return
    script, arguments = re.search(r"scripts/(\w+)\.sh(.*)", line).groups()
    recipe = {"dpo_train": "think", "dpo_instruct_train": "instruct"}[script]
    shutil.copy(project / "recipes" / "think.yaml", project / "recipes" / "mine.yaml")
    config = parse_config(["--config", f"recipes/{recipe}.yaml", *shlex.split(arguments), "--use_cpu"])
    assert config.train.output_dir.startswith("outputs/")


@pytest.mark.parametrize(
    ("env", "fields", "message"),
    [
        ({}, {"lerning_rate": 1}, "error: unknown option --lerning_rate; did you mean --learning_rate?"),
        # found by train_dpo.py, after the launch: rank 0 tells the other
        ({"NUM_PROCESSES": "2"}, {"dataset_name": "missing.jsonl"}, "missing.jsonl"),
    ],
)
def test_mistake_ends_the_job_with_code_2_and_one_line(cluster, project, env, fields, message):
    job = train(cluster, project, env={"NUM_PROCESSES": "1"} | env, output_dir="outputs/mistake", **fields)
    log = end_of(cluster, project, job, "FAILED", "2:0")
    assert message in log.strip().splitlines()[-1]
    error_line(log)


EVALUATE = """\
#!/bin/bash
#SBATCH --job-name=evaluate --time=0:20:00 --output=logs/%x-%j.out
env >logs/environment-$2
exec bash scripts/evaluate.sh "$1" --tasks sums.yaml --out "$3"
"""


@pytest.mark.grid
def test_checkpoints_are_evaluated_by_jobs_of_their_own(cluster, project):
    """They wait in the queue for longer than the run lives. Stops and kills: tests/e2e/test_eval_command.py."""
    rows = [{"question": f"What is {i} and {i}?", "choices": [f"{2 * i}.", "No."]} for i in range(8)]
    write_task(project / "sums.yaml", write_jsonl(project / "sums.jsonl", rows))
    (project / "my_eval.sh").write_text(EVALUATE)
    run = project / "outputs/evaluated"
    command = "sbatch --hold my_eval.sh '{checkpoint}' {step} '{out}'"
    fields = {"output_dir": "outputs/evaluated", "max_steps": 4, "save_steps": 2, "eval_command": command}
    job = train(cluster, project, env={"NUM_PROCESSES": "1"}, **fields)
    log = end_of(cluster, project, job)
    assert "step-2, step-4; once they have ended, run python scripts/evaluate.py outputs/evaluated" in log
    jobs = [(run / f"evaluations/step-{step}.log").read_text().split()[-1] for step in (2, 4)]
    for job in jobs:
        cluster.run("scontrol", "release", job)
    assert [cluster.wait(job, 1800)["ExitCode"] for job in jobs] == ["0:0", "0:0"]
    assert evaluate.main([str(run)]) == 0
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert [row["task"] for row in evaluation["benchmarks"]] == ["sums"]  # the final model's, beside the base
    assert evaluation["checkpoints"].keys() == {"2", "4"}
    assert all(0 <= scores["sums/acc"]["value"] <= 1 for scores in evaluation["checkpoints"].values())
    environment = (project / "logs/environment-4").read_text()
    assert not re.search("^SLURM_(GPUS_PER_NODE|MEM_PER_NODE|STEP_ID)=", environment, re.MULTILINE)


SITE = """
echo "modules of $(hostname) $UNSET"
! false
export SITE_NODE=$SLURM_NODEID PATH=$PWD/modules:$PATH
SRUN_OPTIONS="--environment=dpo --container-mounts=/data:/data"
"""
CONTAINER = """#!/bin/bash
[[ "$1 $2" = "--environment=dpo --container-mounts=/data:/data" ]] || exit 1
echo "step in a container"
PATH=${PATH/"$PWD/modules:"/}
exec srun "${@:3}"
"""
AT_SITE = """
import os
from sfm_dpo.run.folder import write_status

print(f"rank {os.environ['RANK']}: node {os.environ['SITE_NODE']}, {os.environ['TRITON_CACHE_DIR']}")
write_status("outputs/site", "done", 0, step=4)
"""


def test_the_site_file_is_sourced_on_every_node(cluster, project, tmp_path):
    """It leaves bash's strictness and the chosen environment as they were; a python of its modules comes after. Every
    step gets its SRUN_OPTIONS, which a container's srun takes."""
    folder = stand_in(project, tmp_path, AT_SITE, {"output_dir": "outputs/site"})
    (folder / "scripts/site.sh").write_text(SITE)
    (folder / "modules").mkdir()
    (folder / "modules/python").symlink_to("/bin/false")
    (folder / "modules/srun").write_text(CONTAINER)
    (folder / "modules/srun").chmod(0o755)
    env = {"NUM_PROCESSES": "1", "SKIP_HEALTHCHECK": "0"}
    log = end_of(cluster, folder, train(cluster, folder, "--nodes=2", env=env, output_dir="outputs/site"))
    assert sorted(re.findall("^([01]): modules of", log, re.MULTILINE)) == ["0", "0", "1", "1"], log  # check, training
    cache = f"/tmp/sfm-dpo-{os.getuid()}/triton"
    assert f"rank 0: node 0, {cache}\n" in log and f"rank 1: node 1, {cache}\n" in log
    assert log.count("step in a container") == 2, log
    words = [f"--export=LAUNCH=cpu,VENV={CPU['VENV']}", "scripts/evaluate.sh", "outputs/none"]
    evaluation = cluster.sbatch(*words, cwd=folder)
    log = end_of(cluster, folder, evaluation, "FAILED", "2:0", name="evaluate")
    assert "step in a container" in log and "error: outputs/none: not a run's folder" in log, log


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("fi\n", "site.sh: line 1: syntax error near unexpected token `fi'"),
        ("return 3", "site.sh: returned 3 on "),
        ("exit 0", "site.sh: calls exit; use return"),
    ],
)
def test_a_site_file_that_fails_ends_the_job_with_one_line(cluster, project, tmp_path, site, message):
    folder = stand_in(project, tmp_path, "")
    (folder / "scripts/site.sh").write_text(site)
    evaluation = cluster.sbatch("scripts/evaluate.sh", "outputs/dpo", cwd=folder)
    for job, name in ((train(cluster, folder), "dpo-train"), (evaluation, "evaluate")):
        log = end_of(cluster, folder, job, "FAILED", "2:0", name=name)
        assert log.count("\n") == 1 and log.startswith(f"error: scripts/{message}"), log


def test_submitted_from_another_folder(cluster, project, tmp_path):
    (tmp_path / "logs").mkdir()
    job = cluster.sbatch(str(project / "scripts/dpo_train.sh"), cwd=tmp_path)
    log = end_of(cluster, tmp_path, job, "FAILED", "2:0")
    assert log == f"error: {tmp_path} is not the project folder; cd there and run: sbatch scripts/dpo_train.sh\n"


@pytest.mark.grid
def test_a_dry_run_of_the_checks_on_the_cpu_passes_and_writes_its_table(cluster, project):
    job = cluster.sbatch("scripts/check_gpu.sh", "--config", "recipes/think.yaml", cwd=project, **CPU)
    record = cluster.wait(job, 3000)
    log = log_of(project, job, "check-gpu")
    folder = project / "outputs/check-gpu"
    logs = [text[-4000:] for path in folder.glob("*.log") if "exitcode" in (text := path.read_text())]
    assert record["JobState"] == "COMPLETED", "\n".join([log[-6000:], *logs])
    rows = json.loads((folder / "checks.json").read_text())
    assert [row["result"] for row in rows] == 7 * ["pass"], rows
    assert "memory measured" in rows[-1]["found"] and rows[5]["found"].startswith("loss within 0.0e+00 (")
    assert all(row["check"] in log for row in rows)
