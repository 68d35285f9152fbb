"""The state of runs, from folders of every state, with and without Slurm, and from the command itself."""

import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import status
import yaml

from sfm_dpo.common.process import this_process
from sfm_dpo.report.page import write_report
from sfm_dpo.run import reader
from sfm_dpo.run.checkpoint import STOP, mark_complete, stop_is_for_good
from sfm_dpo.run.folder import ENVIRONMENT, LOG, RESOLVED_CONFIG, STATUS, write_status
from sfm_dpo.run.lock import LOCK
from sfm_dpo.run.reader import describe_run, find_runs, format_runs
from tests.run.test_lock import write_lock

ROOT = Path(__file__).resolve().parents[2]
RUNNING = {"step": 30, "max_steps": 120, "eta_seconds": 3723, "loss": 0.61, "margin": 0.2, "pairs_per_second": 1.5}


def make(folder: Path, state: str, starts: int = 1, host: str | None = None, **facts) -> Path:
    folder.mkdir(parents=True)
    (folder / ENVIRONMENT).write_text(json.dumps({"starts": [{"step": 0}] * starts}))
    write_status(folder, state, facts.pop("exit_code", None), facts.pop("message", ""), **facts)
    if state == "running":
        write_owner(folder, host=host or platform.node())
    return folder


def write_owner(run: Path, **facts) -> None:
    write_lock(run, **this_process() | facts)


def state(run: Path, queue: dict[str, str] | None = None) -> str:
    return describe_run(run, queue, time.time())["state"]


@pytest.fixture(autouse=True)
def no_job(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_running_run(tmp_path):
    run = make(tmp_path / "outputs" / "a", "running", starts=3, **RUNNING)
    for step in (10, 20):
        (run / f"checkpoint-{step}").mkdir()
        (run / f"checkpoint-{step}" / "model.safetensors").write_bytes(b"x")
    mark_complete(run / "checkpoint-10", {})
    (run / "health.json").write_text('{"verdict": "healthy"}')
    held_out = [{"step": n, "eval_loss": 1 / n, "eval_rewards/accuracies": n / 40} for n in (10, 20)]
    entries = [*held_out, {"step": 30, "loss": 0.61}, {"step": 30, "eval_math_loss": 0.1}]
    (run / LOG).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    times = ["2026-01-01T00:00:00+00:00", "2026-01-01T02:00:00+00:00", "2026-01-02T00:00:00+00:00"]  # 2 h, killed, 1 h
    starts = [{"step": 0, "world_size": 4, "time": time} for time in times]
    starts[0]["end"] = times[1]
    (run / ENVIRONMENT).write_text(json.dumps({"starts": starts, "gpus": ["H100"]}))
    write_status(run, "running", **RUNNING, trained="2026-01-02T01:00:00+00:00")
    write_status(run, "running", **RUNNING)  # by a process that does not train
    facts = describe_run(run, None, time.time())
    expected = {"run": str(run), "state": "running", "health": "healthy", "GPU-h": 12.0, "step": 30, "max_steps": 120}
    expected |= {"eta": 3723, "loss": 0.61, "margin": 0.2, "pairs/s": 1.5, "eval_loss": 0.05, "eval_acc": 0.5}
    assert expected.items() <= facts.items()
    assert facts["last"] < 60
    head, line = format_runs([facts]).splitlines()
    assert head.split() == reader.COLUMNS
    for cell in ("30/120", "1:02:03", "1.50", "0.6100", "+0.200", "0.0500", "0.500", "healthy", "12.0"):
        assert cell in line, cell
    write_status(run, "done", 0, step=120)
    assert describe_run(run, None, time.time())["loss"] == 0.61  # the last one logged


def test_running_by_its_own_word_but_gone(tmp_path, dead):
    run = make(tmp_path / "a", "running")
    assert state(run) == "running"  # the process that wrote it is this one
    write_owner(run, pid=dead["pid"])
    assert state(run) == "died"
    elsewhere = make(tmp_path / "b", "running", host="another-node")
    write_owner(elsewhere, host="another-node", pid=dead["pid"])
    assert state(elsewhere) == "running"  # cannot be known
    assert describe_run(elsewhere, None, time.time() + reader.STALE_SECONDS + 5)["state"] == "stale"
    (elsewhere / LOCK).unlink()
    assert state(elsewhere) == "died"


def test_a_folder_that_is_locked_and_empty(tmp_path, capsys):
    run = tmp_path / "outputs/check-gpu"
    run.mkdir(parents=True)
    write_owner(run)
    assert status.main([]) == 0
    assert re.search(r"^outputs/check-gpu +locked ", capsys.readouterr().out, re.MULTILINE)
    assert status.main(["--stop", str(run)]) == 2
    assert "does not run (state locked)" in capsys.readouterr().err


def test_slurm_has_the_last_word(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SFM_JOB_LOG", "/logs/dpo-train-4711.out")
    run = make(tmp_path / "a", "running", host="n1")
    shown = describe_run(run, None, time.time())
    assert shown["job"] == "4711" and format_runs([shown]).endswith(f"{run}: log in /logs/dpo-train-4711.out")
    assert [state(run, queue) for queue in ({"4711": "RUNNING"}, {}, None)] == ["running", "died", "running"]
    assert state(run, {"4711": "PENDING"}) == "died, queued"  # its node failed
    assert describe_run(run, {}, time.time())["slurm"] == "not queued"
    write_status(run, "stopped", 75, "stopped on request", step=4)
    assert [state(run, queue) for queue in ({"4711": "PENDING"}, {})] == ["stopped, queued", "stopped"]
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4700")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    write_status(run, "running")
    assert describe_run(run, {}, time.time())["job"] == "4700_2"


def test_runs_are_found_given_and_one_folder_deeper_and_told_with_their_last_words(tmp_path):
    good = make(tmp_path / "sweep" / "good", "done", exit_code=0, step=9)
    bad = make(tmp_path / "bad", "failed", exit_code=1, message="disk full while writing checkpoint-4")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / STATUS).write_text("{ha")
    (tmp_path / "no run").mkdir()
    runs = [describe_run(run, None, time.time()) for run in find_runs([tmp_path])]
    assert [Path(found["run"]).name for found in runs] == ["bad", "odd", "good"]
    assert [found["state"] for found in runs] == ["failed", "unknown", "done"]
    assert format_runs(runs).splitlines()[-1] == f"{bad}: disk full while writing checkpoint-4"
    assert find_runs([bad, tmp_path / "sweep", bad]) == [bad, good]


def test_the_fields_of_a_sweep_are_columns(tmp_path):
    def table() -> list[list[str]]:
        runs = [describe_run(run, None, time.time()) for run in find_runs([tmp_path])]
        return [line.split()[1:4] for line in format_runs(runs).splitlines()]

    for rate in (1e-6, 5e-7):
        run = make(tmp_path / f"{rate}", "done", step=9)
        swept = {"data_seed": rate * 1e7, "learning_rate": rate}
        fields = swept | {"beta": 5, "output_dir": str(run), "save_steps": rate}
        (run / RESOLVED_CONFIG).write_text(yaml.safe_dump(fields))
    assert table() == [["data_seed", "learning_rate", "state"], ["10.0", "1e-06", "done"], ["5.0", "5e-07", "done"]]
    (run / RESOLVED_CONFIG).write_text("{learning_rate: 1, seed: 2, max_length: 3, dataset_name: a}")
    assert table()[0] == ["state", "job", "step"]  # no sweep: the runs differ in six fields


def test_a_report_from_before_the_end_is_named(tmp_path, without_curves):
    run = make(tmp_path / "a", "stopped", starts=0, step=29)
    (run / LOG).write_text('{"step": 29, "loss": 0.6}\n')
    write_report(run)
    assert describe_run(run, None, time.time())["report"] is None
    (run / LOG).write_text('{"step": 29, "loss": 0.6}\n{"step": 60, "loss": 0.6}\n')
    shown = format_runs([describe_run(run, None, time.time())])
    assert shown.endswith(f"{run}: report.html is as of step 29, the run ended at step 60")
    write_owner(run)  # it runs again
    assert describe_run(run, None, time.time())["report"] is None


def test_a_run_is_stopped_for_good_only_if_it_runs(tmp_path, capsys):
    run = make(tmp_path / "a", "running", host="another-node")  # where it is alive for all that is known
    write_owner(run, host="another-node")
    assert status.main(["--stop", str(run)]) == 0
    assert stop_is_for_good(run)
    loading = make(tmp_path / "c", "stopped")  # by an earlier start; this one has the lock
    write_owner(loading)
    assert (state(loading), status.main(["--stop", str(loading)])) == ("loading", 0)
    for run in (make(tmp_path / "b", "stopped"), tmp_path / "none"):
        assert status.main(["--stop", str(run)]) == 2
        assert f"--stop {run}: does not run (state " in capsys.readouterr().err
    (tmp_path / "a" / STOP).write_text("")  # touch
    assert not stop_is_for_good(tmp_path / "a")


@pytest.mark.parametrize(
    ("script", "argument", "module"),  # that it imports of its own
    [("status", ".", "sfm_dpo.run.folder"), ("analyze_dataset", "--help", "argparse")],
)
def test_what_only_reads_runs_and_help_start_at_once(script, argument, module):
    command = [sys.executable, "-X", "importtime", ROOT / "scripts" / f"{script}.py", argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert module in imported and not imported & {"torch", "transformers", "datasets", "accelerate", "trl"}
