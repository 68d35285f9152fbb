"""scripts/sweep.py on real Slurm: one preflight and reference pass, then an array of four runs, one of them killed."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from sfm_dpo.run.folder import read_status
from tests.slurm.jobs import CPU
from tests.toolbox import wait_for


@pytest.mark.grid
@pytest.mark.timeout(1200)
def test_one_reference_pass_before_the_array_and_a_killed_member_resumes(cluster, project, tmp_path):
    recipe = yaml.safe_load((project / "recipes/think.yaml").read_text())
    recipe |= {"global_batch_size": 12, "per_device_train_batch_size": 6, "max_steps": 24, "save_steps": 6}
    recipe |= {"logging_steps": 1, "eval_fraction": 0.25}
    (project / "recipes/swept.yaml").write_text(yaml.safe_dump(recipe))
    grid = {"recipe": "recipes/swept.yaml", "output_dir": "outputs/my sweep", "at_once": 2}
    grid |= {"fields": {"learning_rate": [1e-7, 1e-5, 1e-4, 1e-3]}, "rank_by": "eval_loss"}
    (project / "grid.yaml").write_text(yaml.safe_dump(grid))
    env = CPU | {"HF_HOME": str(tmp_path / "hf"), "NUM_PROCESSES": "1"}

    def sweep(*options: str) -> str:
        return cluster.run(sys.executable, "scripts/sweep.py", "grid.yaml", *options, cwd=project, **env)

    def log_of(run: Path) -> str:
        return Path(read_status(run)["log"]).read_text()

    array = re.search(r"Submitted batch job (\d+)", sweep())[1]
    cluster.run("scontrol", "hold", f"{array}_0")  # before the first job ends, which starts the array
    runs = [project / f"outputs/my sweep/learning_rate={rate}" for rate in ("1e-07", "1e-05", "0.0001", "0.001")]
    wait_for(lambda: (read_status(runs[0]) or {}).get("state") == "stopped" and "ended: " in log_of(runs[0]), 300)
    first = log_of(runs[0])
    assert "ended: state stopped, exit code 0" in first and "preflight_only: nothing was trained" in first
    assert (runs[0] / "preflight.json").is_file() and not any(run.exists() for run in runs[1:])
    assert (project / f"logs/dpo-train-{read_status(runs[0])['task']}.out").is_file()
    wait_for(lambda: f"logs/dpo-train-{array}" in (read_status(runs[1]).get("log") or ""), 120)
    [shown] = json.loads(cluster.run(sys.executable, "scripts/status.py", "--json", str(runs[0]), cwd=project, **env))
    assert (shown["state"], shown["slurm"]) == ("stopped, queued", "PENDING")
    cluster.run("scontrol", "release", f"{array}_0")

    wait_for(lambda: list(runs[1].glob("checkpoint-*/complete.json")), 300)
    cluster.run("scancel", "--signal=KILL", f"{array}_1")
    states = [cluster.wait(f"{array}_{number}", 400)["JobState"] for number in range(4)]
    assert [states[n] for n in (0, 2, 3)] == ["COMPLETED"] * 3 and states[1] != "COMPLETED"
    text = "".join(map(log_of, runs))
    shards = r"reference log-probs of the train pairs: (\d+) of (\d+) shards"
    [(begun, total)] = re.findall(shards, first)
    assert begun == "0" and re.findall(shards, text) == [(total, total)] * 4

    assert " --array=1%2 " in sweep("--dry_run")
    array = re.search(r"Submitted batch job (\d+)", sweep())[1]
    record = cluster.wait(f"{array}_1", 400)
    assert record["JobState"] == "COMPLETED" and f"resuming from outputs/my sweep/{runs[1].name}/ch" in log_of(runs[1])
    assert "0 of the 4 runs are to be submitted" in sweep()
    table = sweep("--table")
    assert table.count("1 done") == 4
    assert table.splitlines()[1].startswith("0.001 ")  # at the others the tiny model hardly moves
