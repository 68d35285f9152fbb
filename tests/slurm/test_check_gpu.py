"""scripts/check_gpu.sh on two CPU processes: every check passes, and the table is there."""

import json

import pytest

from tests.slurm.jobs import CPU, log_of


@pytest.mark.grid
@pytest.mark.timeout(1500)
def test_a_rehearsal_on_the_cpu_passes_and_writes_its_table(cluster, project):
    job = cluster.sbatch("scripts/check_gpu.sh", "--config", "recipes/think.yaml", cwd=project, **CPU)
    record = cluster.wait(job, 1400)
    log = log_of(project, job, "check-gpu")
    assert record["JobState"] == "COMPLETED", log[-6000:]
    folder = project / "outputs/check-gpu"
    rows = json.loads((folder / "checks.json").read_text())
    results = {row["check"]: row["result"] for row in rows}
    measured = {"attention kernels", "memory", "throughput", "speed flags"}
    assert results == {name: "measured" if name in measured else "pass" for name in results} and len(results) == 11
    text = {row["check"]: row["found"] for row in rows}
    assert text["node"] == "health: 1 node(s), 2 rank(s) fine"
    assert "packed+bf16 rounding" in text["packed and shared rows"] and "shared+bf16" in text["packed and shared rows"]
    assert "pairs per device" in text["memory"] and "bitwise equal" in text["resume"]
    assert "torch_compile" in text["speed flags"] and "graphs" in text["speed flags"]
    calibration = json.loads((folder / "calibration.json").read_text())
    assert calibration["gpu"] == "cpu" and calibration["memory_ratio"] > 0
    assert all(row["check"] in log for row in rows)
