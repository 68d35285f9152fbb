"""eval_command with real runs: each checkpoint once, through a stop and a kill, and where results appear."""

import json
import os
from pathlib import Path

import evaluate
import pytest
import status

from sfm_dpo.run.checkpoint import checkpoints, step_of
from sfm_dpo.run.reader import read_run

# Writes its arguments and the two variables of a rank into ./calls, then a result, once ./open is there
HARNESS = """#!/bin/bash
echo "$2 $1" >>calls
echo "RANK=$RANK SLURM_GPUS_PER_NODE=$SLURM_GPUS_PER_NODE"
until [ -e open ]; do sleep 0.1; done
[ "$2" != 4 ] || exit 7
echo "{\\"acc\\": 0.$2, \\"f1\\": {\\"value\\": $2, \\"stderr\\": 0.25}}" >"$3"
"""


@pytest.fixture
def harness(tmp_path) -> Path:
    script = tmp_path / "harness.sh"
    script.write_text(HARNESS)
    script.chmod(0o755)
    return script


@pytest.mark.slow
def test_each_checkpoint_is_evaluated_once_through_a_stop_and_a_kill(place, train_here, harness, monkeypatch):
    """Two at once, so that others wait, and none is rotated away. That of step 4 fails, and is tried again once."""
    calls = harness.with_name("calls")
    fields = {"eval_command": f"{harness} {{checkpoint}} {{step}} {{out}}", "save_steps": 2, "save_total_limit": 2}
    fields["guard"] = "skip"  # it keeps checkpoints, too
    apart = {"popen": {"cwd": harness.parent}, "env": {"RANK": "0", "SLURM_GPUS_PER_NODE": "4"}}
    run = place.start("evaluated", **fields, **apart)
    stopped = run.stop_at(3)
    run = place.start("evaluated", **fields, **apart)
    assert run.until((run.folder / "checkpoint-6/complete.json").exists)
    run.process.kill()
    run.process.wait()
    assert len(calls.read_text().splitlines()) == 2, "more than two at once"
    steps = {2, stopped, 4, 6}
    assert all((run.folder / f"checkpoint-{step}/complete.json").exists() for step in steps)
    harness.with_name("open").touch()
    monkeypatch.chdir(harness.parent)
    run = train_here("evaluated", **fields)
    called = sorted(int(line.split()[0]) for line in calls.read_text().splitlines())
    assert called == sorted([*steps, 4, 8]), "only what has left no result is started again"
    assert f"8 {run.folder}\n" in calls.read_text() and f"2 {run.folder}/checkpoint-2\n" in calls.read_text()
    assert (run.folder / "evaluations/step-2.log").read_text() == "RANK= SLURM_GPUS_PER_NODE=\n"
    assert f"warning: evaluation of step 4 failed (exit code 7, {run.folder}/evaluations/step-4.log): " in run.log
    assert "evaluation of step 8: acc 0.8, f1 8\n" in run.log
    assert [step_of(path) for path in checkpoints(run.folder)] == [6, 8], "rotated once they are evaluated"
    results = json.loads((run.folder / "evaluation.json").read_text())["checkpoints"]
    assert {int(step) for step in results} == {*steps, 8} - {4}
    assert results["8"] == {"acc": {"value": 0.8, "stderr": None}, "f1": {"value": 8, "stderr": 0.25}}


@pytest.mark.slow
def test_where_results_appear(place, train_here, harness, monkeypatch, capsys):
    monkeypatch.chdir(harness.parent)
    harness.with_name("open").touch()
    command = f"{harness} {{checkpoint}} {{step}} {{out}}"
    fields = {"eval_command": command, "save_steps": 2, "max_steps": 3}
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run = place.start("results", report_to="wandb", env=env, popen={"cwd": harness.parent}, **fields).finish()
    assert any(b"evaluation/acc" in path.read_bytes() for path in harness.parent.rglob("*.wandb"))
    assert read_run(run.folder)["log"][-1]["evaluation/acc"] == 0.3
    page = (run.folder / "report.html").read_text()
    assert 'aria-label="evaluation: f1 by optimizer step"' in page and "<td>2.000 ± 0.250</td>" in page
    assert "| 3 | 0.300 | 3.000 ± 0.250 |" in (run.folder / "README.md").read_text()
    status.main([str(run.folder)])
    assert f"{run.folder}: evaluation of step 3: acc 0.3, f1 3\n" in capsys.readouterr().out
    out = run.folder / "evaluations/step-3.json"
    for wrong in ("acc: 1", '{"acc": "high"}', '{"acc": NaN}', "[1]", "{}"):
        out.write_text(wrong)
        assert evaluate.main([str(run.folder)]) == 2
        assert f"error: {out}: is not a result of eval_command: " in capsys.readouterr().err
    harness.write_text("#!/bin/bash\nsleep 2; echo done >$3\n")
    squeue = harness.with_name("squeue")
    squeue.write_text("#!/bin/bash\n")  # no longer knows the job of an earlier start
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    out.with_suffix(".log").write_text("Submitted batch job 11\n")
    run = train_here("results", **fields)  # which is done, but for this evaluation
    where = f"exit code 0, {out.with_suffix('.log')}"
    assert f"warning: evaluation of step 3 failed ({where}): {command}: {out}: is not a result of" in run.log
