"""scripts/check_gpu.sh as its twin on two CPU processes: every check passes, and the table is there."""

import json

import pytest

from tests.slurm.jobs import CPU, log_of


@pytest.mark.grid
@pytest.mark.timeout(1500)
def test_the_twin_passes_and_writes_its_table(cluster, project):
    job = cluster.sbatch("scripts/check_gpu.sh", "--config", "recipes/think.yaml", cwd=project, **CPU)
    record = cluster.wait(job, 1400)
    log = log_of(project, job, "check-gpu")
    assert record["JobState"] == "COMPLETED", log[-6000:]
    folder = project / "outputs/check-gpu"
    rows = json.loads((folder / "checks.json").read_text())
    results = {row["check"]: row["result"] for row in rows}
    figures = {"memory", "throughput", "speed flags"}
    assert results == {name: "figure" if name in figures else "pass" for name in results} and len(results) == 14
    text = {row["check"]: row["figure"] for row in rows}
    assert text["node"] == "health: 1 node(s), 2 rank(s) fine"
    assert "SDPA window error" in text["packed attention"]
    assert "packed+bf16 rounding" in text["packed against padded"]
    assert "shared+bf16 rounding" in text["prefix sharing"] and "packed rounding" in text["hybrid layers"]
    assert "pairs per device" in text["memory"]
    assert "loss bitwise" in text["stop and resume"]
    assert "torch_compile made" in text["speed flags"]
    calibration = json.loads((folder / "calibration.json").read_text())
    assert calibration["gpu"] == "cpu" and calibration["memory_ratio"] > 0
    page = (folder / "report.html").read_text()
    assert all(row["check"] in page for row in rows)
    assert log.rstrip().endswith("outputs/check-gpu/report.html")
