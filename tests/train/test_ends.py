"""How a run ends, and what it says then: train_dpo.py in this process."""

import errno
import json
import os
import re
import resource
import select
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import train_dpo
from sfm_dpo import training_run
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.process import is_alive, this_process
from sfm_dpo.report.page import write_report
from sfm_dpo.run import folder
from sfm_dpo.run.checkpoint import COMPLETE, STOP
from sfm_dpo.run.folder import DATA, LOG, RESOLVED_CONFIG, STATUS, read_file, read_status
from sfm_dpo.run.lock import LOCK, Lease, take_folder
from sfm_dpo.run.reader import describe_run
from sfm_dpo.train.callbacks import ProgressLine
from sfm_dpo.training_run import TrainingRun
from tests.toolbox import UNREADABLE, edit, error_line, logged, on_cpu, pairs, write_jsonl


@pytest.fixture(scope="module")
def stopped(tiny_folder, tmp_path_factory) -> SimpleNamespace:
    """A run that was stopped for good in its first step: its folder, its command line, and what it printed."""
    root = tmp_path_factory.mktemp("stopped")
    run = root / "run"
    run.mkdir()
    (run / STOP).write_text("for good\n")
    fields = {"eval_fraction": 0.25, "learning_rate": 1e-3, "logging_steps": 50}  # no step is logged
    fields["save_strategy"] = "epoch"  # which ends with the stop
    command = on_cpu(tiny_folder("llama"), write_jsonl(root / "p.jsonl", pairs(16)), run, **fields)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setenv("SFM_GRACE_SECONDS", "0")
        patch.setattr(training_run, "write_report", lambda run: None)
        assert train_dpo.main(command) == 75
    return SimpleNamespace(run=run, command=command, out=out.getvalue(), err=err.getvalue())


@pytest.fixture
def to_resume(stopped, tmp_path, no_report) -> SimpleNamespace:
    """A copy of `stopped`, and the command that resumes it."""
    run = shutil.copytree(stopped.run, tmp_path / "run")
    return SimpleNamespace(run=run, command=[*stopped.command, "--output_dir", str(run)])


def test_a_save_that_outlasts_the_grace_period_is_reported(stopped):
    assert "a save takes longer than --signal; submit with --signal=B:USR1@" in stopped.err
    assert read_status(stopped.run)["for_good"] is True
    assert stopped.out.count("checkpoint saved in") == 1


def test_the_base_model_s_evaluation_is_not_taken_for_a_later_one(stopped, without_curves):
    assert re.search(r"reward accuracy +0.50, all ties$", stopped.out, re.MULTILINE)
    assert "<th>before, step 0</th></tr>" in write_report(stopped.run).read_text()


def test_a_preflight_is_also_made_of_a_run_that_was_stopped(to_resume, capsys):
    preflight = ["--preflight_only", "true", "--preflight", "warn"]
    train_dpo.main([*to_resume.command, *preflight])
    assert (to_resume.run / "preflight.json").is_file() and "preflight: " in capsys.readouterr().out
    assert train_dpo.main(to_resume.command) == 0 and "resuming from " in capsys.readouterr().out


def test_a_resumed_run_keeps_its_calibration_and_prints_its_last_evaluation(to_resume, capsys):
    run = to_resume.run
    calibration = read_file(run / DATA)["calibration"]
    assert train_dpo.main(to_resume.command) == 0
    assert read_file(run / DATA)["calibration"] == calibration
    evals = {entry["step"]: entry["eval_loss"] for entry in logged(run, "eval_loss")}
    assert set(evals) == {0, 3} and evals[3] < evals[0] == pytest.approx(0.6931, abs=1e-4)
    assert f"{evals[3]:.3f}" in capsys.readouterr().out.rpartition("held out")[2]


@pytest.fixture
def again(run, without_curves, environment) -> list[str]:
    """The command of `run`, which is done."""
    return ["--config", str(run / RESOLVED_CONFIG), "--output_dir", str(run)]


def test_a_run_that_is_done_writes_what_is_missing_and_drops_a_late_stop(run, again, capsys):
    (run / "README.md").unlink()
    (run / STOP).touch()
    (run / ".status.json.n1.7.partial").touch()  # of a killed process
    assert train_dpo.main(again) == 0
    assert "already done" in capsys.readouterr().out
    assert (run / "README.md").is_file() and not (run / STOP).exists() and not list(run.glob(".*.partial"))


def test_a_done_run_whose_status_cannot_be_written_is_done_when_it_can(run, again, monkeypatch, capsys):
    weights = (run / "model.safetensors").stat().st_mtime_ns
    (run / STATUS).write_text('{"state": "running"}')  # a full disk, when the end was written
    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_atomically", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        assert train_dpo.main(again) == 0
    remedy = "status.json cannot be written; make it writable, and run the same command again"
    assert error_line(capsys.readouterr().err) == f"error: {run}: {remedy}"
    assert train_dpo.main(again) == 0
    assert "already done" in capsys.readouterr().out and read_file(run / STATUS)["state"] == "done"
    assert read_file(run / STATUS)["step"] == 6 and (run / "model.safetensors").stat().st_mtime_ns == weights


IN_A_CHECKPOINT = [f"checkpoint-6/{COMPLETE}", "checkpoint-6/optimizer.pt"]


@pytest.mark.parametrize("name", [STATUS, COMPLETE, RESOLVED_CONFIG, LOG, *IN_A_CHECKPOINT])
def test_what_cannot_be_read_stops_the_start_and_is_kept(run, again, capsys, name):
    again = ["--config", str(shutil.copy(run / RESOLVED_CONFIG, run.parent)), *again[2:]]
    edit(run / STATUS, state="running")
    if name != COMPLETE:
        (run / COMPLETE).unlink()
    mark = run / "checkpoint-6" / COMPLETE
    edit(mark, files=json.loads(mark.read_text())["files"] | {"optimizer.pt": 0})
    path = run / name
    path.unlink()
    path.symlink_to(UNREADABLE)
    assert train_dpo.main(again) == 1
    remedy = "check its disk or file server, and run the same command again to resume"
    assert error_line(capsys.readouterr().err) == f"error: {path}: Input/output error; {remedy}"
    assert mark.exists() and not (run / LOCK).exists()


def test_a_damaged_final_model_is_named_with_its_remedy(run, again, capsys):
    with (run / "model.safetensors").open("ab") as file:
        file.truncate(file.tell() - 1)
    assert train_dpo.main(again) == 2
    error = error_line(capsys.readouterr().err)
    remedy = f"remove {run}/status.json and {run}/complete.json and run its command again, which saves the model again"
    assert "has a damaged model.safetensors" in error and error.endswith(f"{remedy} from {run}/checkpoint-6")


def test_a_run_without_status_and_mark_saves_its_model_again_without_what_kills_left(run, again):
    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[:-1])
    (run / STATUS).unlink()
    (run / COMPLETE).unlink()
    (run / "checkpoint-6" / COMPLETE).unlink()
    for folder_ in (run, run / "checkpoint-6"):
        (folder_ / ".tmpAb12Cd").touch()  # safetensors was killed
    assert train_dpo.main(again) == 0
    assert (run / "model.safetensors").read_bytes() == weights
    assert not list(run.rglob(".tmp*"))
    assert ".tmpAb12Cd" not in read_file(run / "checkpoint-6" / COMPLETE)["files"]


def test_a_folder_that_is_removed_at_the_end_is_one_line(run, again, monkeypatch, capsys):
    (run / "report.html").unlink()
    monkeypatch.setattr(training_run, "write_report", shutil.rmtree)
    assert train_dpo.main(again) == 1
    assert error_line(capsys.readouterr().err).endswith(f"{run}: was removed or moved during the run; start it again")


UNWRITABLE = {errno.ENOSPC: "free space", errno.EACCES: "give yourself read and write permission"}
UNWRITABLE[errno.EROFS] = "use another node, or have it mounted read-write"
LOADING_FAILS = [
    (MemoryError("9 GiB"), 2, "out of memory in loading"),
    (OSError(errno.EIO, "Input/output error", "/x"), 1, "Input/output error; check its disk or file server, and run"),
]


@pytest.mark.parametrize(("number", "remedy"), UNWRITABLE.items())
def test_a_disk_that_takes_nothing_more_is_one_line(tmp_path, unnamed, monkeypatch, capsys, number, remedy):
    error = OSError(number, os.strerror(number), "/disk/file")

    def fail(*args, **options):
        monkeypatch.setattr(folder, "write_atomically", fail)
        raise error

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    monkeypatch.setattr(train_dpo, "identify_models", fail)
    assert train_dpo.main(unnamed) == 1
    line = f"error: /disk/file: {error.strerror}; {remedy}, and run the same command again to resume\n"
    assert capsys.readouterr().err == line
    assert read_status(tmp_path / "run")["state"] == "failed"  # written into the old file


def test_torch_save_does_not_say_why_it_fails(tmp_path, capsys):
    with TrainingRun() as run:
        run.output_dir = run.folder = tmp_path
        run.progress.saving = tmp_path / "checkpoint-2"
        torch.save({}, "/dev/full")
    what = f"{tmp_path}/checkpoint-2: disk full, failing or read-only, or `ulimit -f` reached"
    remedy = "free space, or check its disk or file server, and run the same command again to resume"
    assert error_line(capsys.readouterr().err) == f"error: {what}; {remedy}"


def test_no_space_in_shared_memory_is_not_said_of_the_run_s_disk(tmp_path, no_report):
    with pytest.raises(RuntimeError, match="torch_7"), TrainingRun() as run:
        run.output_dir = run.folder = tmp_path
        raise RuntimeError("unable to write to file </torch_7>: No space left on device (28)")
    assert read_status(tmp_path)["message"].startswith("RuntimeError: unable to write")


def limit_files(run):
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize(
    ("meddle", "code", "state", "message"),
    [
        (shutil.rmtree, 1, None, "output_dir {run}: was removed or moved during the run; start it again"),
        (limit_files, 1, "failed", "`ulimit -f`"),
        (lambda run: (run / STOP).mkdir(), 0, "done", ""),
    ],
)
def test_what_a_person_does_to_a_running_run_is_one_line(
    tiny_folder, write_rows, tmp_path, monkeypatch, capsys, meddle, code, state, message
):
    run = tmp_path / "run"
    fields = on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(16)), run, max_steps=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def act(self, args, trainer_state, *rest, **kwargs):
        if trainer_state.global_step == 1:
            meddle(run)

    monkeypatch.setattr(ProgressLine, "on_step_begin", act)
    try:
        assert train_dpo.main(fields) == code
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert message.format(run=run) in (error_line(error) if code else error)
    assert read_status(run).get("state") == state
    assert not (run / LOCK).exists()


@pytest.fixture
def signals():
    """What SIGINT and SIGTERM do to a new process; afterwards what they did here."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def reset():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    yield reset
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_thread_may_train(capsys):
    with ThreadPoolExecutor(1) as pool:  # where Python refuses to set a handler
        assert pool.submit(train_dpo.main, ["--beta", "0"]).result() == 2
    assert error_line(capsys.readouterr().err)


def test_children_of_a_run_end_by_sigterm(signals):
    signals()
    with TrainingRun():
        child = os.fork()
        if not child:
            os._exit(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        assert os.waitpid(child, 0)[1] == 0 and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_processes_of_a_pool_end_with_a_run_that_is_killed():
    reader, writer = os.pipe()
    if not (run := os.fork()):
        with TrainingRun():
            if not os.fork():
                os.write(writer, json.dumps(this_process()).encode())
                time.sleep(3600)
            select.select([reader], [], [])
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(run, 0)
    worker = json.loads(os.read(reader, 4096))
    while is_alive(worker):
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_ctrl_c_and_sigterm_are_a_stop(tiny_folder, write_rows, tmp_path, monkeypatch, capsys, signals):
    run = tmp_path / "run"
    write_atomically = folder.write_atomically
    fields = on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(16)), run, save_steps=1)
    for number, step in ((signal.SIGTERM, 2), (signal.SIGINT, 3)):
        signals()

        def interrupt(self, args, state, *rest, number=number, step=step, **kwargs):
            if state.global_step == step:
                signal.raise_signal(number)

        def write(path, content, number=number, **options):
            if '"state": "stopped"' in content:
                signal.raise_signal(number)  # once more
            write_atomically(path, content, **options)

        with monkeypatch.context() as patch:
            patch.setattr(ProgressLine, "on_step_begin", interrupt)
            patch.setattr(folder, "write_atomically", write)
            assert train_dpo.main(fields) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        checkpoint = run / f"checkpoint-{step}"
        line = f"interrupted at step {step}; run the same command again to resume from {checkpoint}\n"
        out, err = capsys.readouterr()
        assert out.endswith(line) and "Traceback" not in err
        status = read_status(run)
        assert (status["state"], status["exit_code"], status["checkpoint"]) == ("stopped", 130, str(checkpoint))
    signals()
    assert train_dpo.main(fields) == 0
    assert f"resuming from {checkpoint}" in capsys.readouterr().out


@pytest.fixture
def unnamed(tmp_path, environment) -> list[str]:
    """A command without a model or data."""
    return f"--model_name_or_path m --dataset_name d.jsonl --use_cpu --output_dir {tmp_path / 'run'}".split()


def test_a_library_s_error_is_one_line_with_its_traceback_in_error_txt(tmp_path, unnamed, monkeypatch, capsys):
    run = tmp_path / "run"
    seen = []

    def fail(*args):
        seen.append(describe_run(run, None, time.time()))
        with user_input("model m", "choose another"):
            raise KeyError("no such model")

    monkeypatch.setattr(train_dpo, "identify_models", fail)
    for _ in range(2):  # error.txt does not block the folder
        assert train_dpo.main(unnamed) == 2
        assert (seen[-1]["state"], seen[-1]["message"]) == ("running", "loading")  # status.py sees it at once
        assert error_line(capsys.readouterr().err) == "error: model m: KeyError: 'no such model'; choose another"
        status = read_status(run)
        assert (status["state"], status["exit_code"], status["message"][:8]) == ("failed", 2, "model m:")
        assert "in fail\n    raise KeyError" in (run / "error.txt").read_text()
    monkeypatch.setattr(train_dpo, "identify_models", Mock(side_effect=UserError("a mistake")))
    assert train_dpo.main(unnamed) == 2 and not (run / "error.txt").exists()


def test_a_start_that_is_refused_before_its_data_are_read_leaves_no_folder(tmp_path, unnamed, capsys):
    assert train_dpo.main([*unnamed, "--resume_from_checkpoint", str(tmp_path)]) == 2
    assert "was not fully written" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_refused_start_leaves_a_folder_that_another_start_has_made_since(tmp_path, unnamed, monkeypatch):
    lock = Lease(tmp_path / "run" / LOCK)

    def be_second(folder):
        assert lock.take()
        return take_folder(folder)

    monkeypatch.setattr(training_run, "take_folder", be_second)
    assert train_dpo.main([*unnamed, "--resume_from_checkpoint", str(tmp_path)]) == 2
    assert (tmp_path / "run" / LOCK).exists()
    lock.release()


@pytest.mark.parametrize(("fault", "code", "message"), LOADING_FAILS)
@pytest.mark.usefixtures("environment")
def test_a_fault_while_the_model_is_loaded_is_no_mistake(
    tiny_folder, write_rows, tmp_path, monkeypatch, capsys, fault, code, message
):
    monkeypatch.setattr("sfm_dpo.train.trainer.load_configured_model", Mock(side_effect=fault))
    run = tmp_path / "run"
    assert train_dpo.main(on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(16)), run)) == code
    assert message in error_line(capsys.readouterr().err) and message[:12] in read_status(run)["message"]


@pytest.mark.usefixtures("environment")
def test_an_error_of_the_report_does_not_change_the_end(tiny_folder, write_rows, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    monkeypatch.setattr(training_run, "write_report", Mock(side_effect=KeyError("step")))
    fields = on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(16)), run, max_steps=1, warmup_steps=0)
    assert train_dpo.main(fields) == 0 and read_status(run)["state"] == "done"
    assert read_status(run)["open"] == ["reported"]
    out = capsys.readouterr().out
    assert "report not written: KeyError: 'step'\n" in out
    monkeypatch.undo()
    assert train_dpo.main(fields) == 0 and read_status(run)["open"] == []
    assert "step 1/1" not in capsys.readouterr().out and (run / "report.html").is_file()
