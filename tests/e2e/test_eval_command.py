"""eval_command with real runs: each checkpoint once, through a stop and a kill, and where results appear."""

import json
from pathlib import Path

import evaluate
import pytest
import status

from sfm_dpo.run.checkpoint import checkpoints, step_of
from sfm_dpo.run.reader import read_evaluations
from tests.toolbox import wait_for

# Writes its arguments into ./calls and three variables of a rank into its log, and ends at once, as sbatch does; a
# result comes once ./open is there
HARNESS = """#!/bin/bash
echo "$2 $1" >>calls
echo "RANK=$RANK SLURM_GPUS_PER_NODE=$SLURM_GPUS_PER_NODE TORCH_FORCE=$TORCH_FORCE_WEIGHTS_ONLY_LOAD"
(
    for i in $(seq 3000); do [ ! -e open ] || break; sleep 0.1; done
    [ "$2" != 6 ] || exit 7
    echo "{\\"acc\\": 0.$2, \\"f1\\": {\\"value\\": $2, \\"stderr\\": 0.25}}" >"$3"
) &
"""


@pytest.fixture
def harness(tmp_path) -> Path:
    script = tmp_path / "harness.sh"
    script.write_text(HARNESS)
    script.chmod(0o755)
    return script


@pytest.mark.slow
def test_each_checkpoint_is_evaluated_once_through_a_stop_and_a_kill(place, train_here, harness, monkeypatch):
    """The three newest that wait for a result are not rotated away. The evaluation of step 6 fails."""
    calls = harness.with_name("calls")
    fields = {"eval_command": f"{harness} {{checkpoint}} {{step}} {{out}}", "save_steps": 1, "save_total_limit": 2}
    fields["guard"] = "skip"  # it keeps checkpoints, too
    rank = {"RANK": "0", "SLURM_GPUS_PER_NODE": "4", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}
    apart = {"popen": {"cwd": harness.parent}, "env": rank}
    run = place.start("evaluated", **fields, **apart)
    run.stop_at(2)
    run = place.start("evaluated", **fields, **apart)
    assert run.until((run.folder / "checkpoint-6/complete.json").exists)
    run.process.kill()
    run.process.wait()
    monkeypatch.chdir(harness.parent)
    run = train_here("evaluated", **fields)
    steps = list(range(1, 9))
    waiting = ", ".join(f"step-{step}" for step in steps)
    assert f"evaluations without a result yet: {waiting}; once they have ended, run python" in run.log
    assert f"{run.folder}/checkpoint-3 is deleted without a result of eval_command: 3 newer ones wait" in run.log
    assert [step_of(path) for path in checkpoints(run.folder)] == [4, 5, 6, 7, 8]
    harness.with_name("open").touch()
    wait_for(lambda: len(read_evaluations(run.folder)) == len(steps) - 1, 300)
    run = train_here("evaluated", **fields)  # it is done
    called = sorted(int(line.split()[0]) for line in calls.read_text().splitlines())
    assert called == steps, "each once"
    assert f"8 {run.folder}\n" in calls.read_text() and f"2 {run.folder}/checkpoint-2\n" in calls.read_text()
    assert (run.folder / "evaluations/step-2.log").read_text() == "RANK= SLURM_GPUS_PER_NODE= TORCH_FORCE=\n"
    assert run.log.count("evaluation of step 8: acc 0.8, f1 8\n") == 1
    assert "evaluations without a result yet: step-6;" in run.log
    assert [step_of(path) for path in checkpoints(run.folder)] == [6, 7, 8], "rotated once they are evaluated"
    (run.folder / "evaluations/step-6.log").unlink()
    train_here("evaluated", **fields)
    wait_for(lambda: len(calls.read_text().splitlines()) == len(steps) + 1, 300)
    assert evaluate.main([str(run.folder)]) == 0
    results = json.loads((run.folder / "evaluation.json").read_text())["checkpoints"]
    assert {int(step) for step in results} == {*steps} - {6}
    assert results["8"] == {"acc": {"value": 0.8, "stderr": None}, "f1": {"value": 8, "stderr": 0.25}}


@pytest.mark.slow
def test_where_results_appear(place, harness, capsys):
    harness.with_name("open").touch()
    command = f"{harness} {{checkpoint}} {{step}} {{out}}"
    fields = {"eval_command": command, "save_steps": 2, "max_steps": 3}
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    run = place.start("results", report_to="wandb", env=env, popen={"cwd": harness.parent}, **fields).finish()
    assert "evaluation of step 2: acc 0.2, f1 2\n" in run.log
    assert any(b"evaluation/acc" in path.read_bytes() for path in harness.parent.rglob("*.wandb"))
    out = run.folder / "evaluations/step-3.json"
    wait_for(lambda: 3 in read_evaluations(run.folder), 300)
    assert evaluate.main([str(run.folder)]) == 0
    page = (run.folder / "report.html").read_text()
    assert "<td>2.000 ± 0.250</td>" in page
    assert "| 3 | 0.300 | 3.000 ± 0.250 |" in (run.folder / "README.md").read_text()
    status.main([str(run.folder)])
    assert f"{run.folder}: evaluation of step 3: acc 0.3, f1 3\n" in capsys.readouterr().out
    for wrong in ("acc: 1", '{"acc": "high"}', '{"acc": NaN}', "[1]", "{}"):
        out.write_text(wrong)
        assert evaluate.main([str(run.folder)]) == 2
        assert f"error: {out}: is not a result of eval_command: " in capsys.readouterr().err
