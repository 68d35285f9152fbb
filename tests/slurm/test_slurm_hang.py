"""A hang under real Slurm: requeued without the node, twice at most. A stand-in writes what the watchdog would."""

from sfm_dpo.run.folder import read_mapping
from tests.slurm.jobs import CPU, log_of, overrides, stand_in

HANGS = """
import json, os, pathlib
from sfm_dpo.run.folder import ENVIRONMENT, read_mapping, write_status

run = pathlib.Path("outputs/hangs")
start = read_mapping(run / ENVIRONMENT)
host, job = os.environ["SLURMD_NODENAME"], os.environ["SLURM_JOB_ID"]
start["hangs"] = [*start.get("hangs", []), {"step": 3, "rank": 0, "host": host, "job": job}]
(run / ENVIRONMENT).write_text(json.dumps(start))
write_status(run, "hung", 70, "no rank has moved", step=3, checkpoint="checkpoint-2", host=host, rank=0)
"""


def test_a_hang_is_requeued_twice_and_goes_on_without_the_node(cluster, project, tmp_path):
    fields = {"output_dir": "outputs/hangs"}
    folder = stand_in(project, tmp_path, HANGS, fields)
    job = cluster.sbatch("scripts/dpo_train.sh", *overrides(**fields), cwd=folder, **CPU, NUM_PROCESSES="1")
    record = cluster.wait(job, 240)
    log = log_of(folder, job)
    assert (record["JobState"], record["ExitCode"], record["Restarts"]) == ("FAILED", "70:0", "2"), log
    assert [f"hung and requeued (restart {n} of at most 20)" in log for n in (1, 2)] == [True] * 2
    assert "hung, not requeued: for the 3. time in this job" in log
    hosts = [hang["host"] for hang in read_mapping(folder / "outputs/hangs/environment.json")["hangs"]]
    assert len(hosts) == 3 and hosts[0] != hosts[1], log
    assert log.count("it goes on without ") == 1, log  # both nodes excluded, there would be none left
    assert log.endswith("ended: state hung, exit code 70, step 3, outputs/hangs: no rank has moved\n")
