"""scripts/sweep.py on real Slurm: an array of three runs, of which one is stopped; the table of what they came to."""

import json
import re
import sys

import pytest
import yaml

from tests.slurm.jobs import CPU, wait_for
from tests.slurm.test_requeue import is_at


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_a_stopped_member_resumes_alone_and_the_reference_pass_is_shared(cluster, project, tmp_path):
    recipe = yaml.safe_load((project / "recipes/think.yaml").read_text())
    recipe |= {"global_batch_size": 12, "per_device_train_batch_size": 6, "max_steps": 40, "save_steps": 10}
    recipe |= {"logging_steps": 1, "eval_fraction": 0.25}
    (project / "recipes/swept.yaml").write_text(yaml.safe_dump(recipe))
    grid = {"recipe": "recipes/swept.yaml", "output_dir": "outputs/my sweep", "at_once": 2}
    grid |= {"fields": {"learning_rate": [1e-7, 1e-5, 1e-3]}, "rank_by": "eval_loss"}
    (project / "grid.yaml").write_text(yaml.safe_dump(grid))
    env = CPU | {"HF_HOME": str(tmp_path / "hf"), "NUM_PROCESSES": "2"}

    def sweep(*options: str) -> str:
        return cluster.run(sys.executable, "scripts/sweep.py", "grid.yaml", *options, cwd=project, **env)

    assert "sbatch --array=0,1,2%2 scripts/dpo_train.sh --members " in sweep("--dry_run")
    array = re.search(r"Submitted batch job (\d+)", sweep())[1]
    runs = [project / f"outputs/my sweep/learning_rate={rate}" for rate in ("1e-07", "1e-05", "0.001")]
    wait_for(lambda: (runs[2] / "status.json").exists(), 240)  # the last task has the id of the array
    status = runs[2] / "status.json"
    wait_for(lambda: json.loads(status.read_text())["job"] == array, 60)
    wait_for(is_at(runs[2], 4, 0, project, array), 240)
    cluster.run("scancel", "--signal=USR1", "--batch", f"{array}_2")
    logs = {}
    for number, run in enumerate(runs):
        record = cluster.wait(f"{array}_{number}", 300)
        job = json.loads((run / "status.json").read_text())["job"]
        logs[number] = (project / f"logs/dpo-train-{job}.out").read_text()
        assert (record["JobState"], record["Restarts"]) == ("COMPLETED", str(int(number == 2))), logs[number][-3000:]
    assert "stopped and requeued (restart 1 of at most 20)" in logs[2]
    assert "going on from outputs/my sweep/learning_rate=0.001/checkpoint-" in logs[2]

    text = "".join(logs.values())
    computed = [int(n) for n in re.findall(r"reference, train: (\d+) shards computed here", text)]
    shards = {int(n) for n in re.findall(r"reference log-probs of the train pairs: \d+ of (\d+) shards", text)}
    assert {sum(computed)} == shards, text[-3000:]

    assert "all 3 members of outputs/my sweep are done" in sweep()
    table = sweep("--table")
    assert table.count("1 done") == 3 and "Take learning_rate 0.001" not in table  # one seed
    assert table.splitlines()[1].startswith("0.001 ")  # at the others the tiny model hardly moves
    assert (project / "outputs/my sweep/sweep.png").stat().st_size > 5000
