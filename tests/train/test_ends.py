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
from unittest.mock import Mock

import pytest

import train_dpo
from sfm_dpo import training_run
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.process import is_alive, this_process
from sfm_dpo.report.page import write_report
from sfm_dpo.run import folder
from sfm_dpo.run.checkpoint import COMPLETE, STOP
from sfm_dpo.run.folder import DATA, RESOLVED_CONFIG, read_file, read_status
from sfm_dpo.run.lock import LOCK, Lease, take_folder
from sfm_dpo.run.reader import describe_run
from sfm_dpo.train.callbacks import ProgressLine
from sfm_dpo.training_run import TrainingRun
from tests.toolbox import error_line, logged, on_cpu, pairs


@pytest.mark.usefixtures("no_report")
def test_a_mismatch_is_refused_and_an_end_is_made_again(tiny_folder, write_rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SFM_GRACE_SECONDS", "0")
    monkeypatch.setattr("sfm_dpo.report.page.draw_curves", lambda *args, **kwargs: [])
    run = tmp_path / "output_dir"
    more = {"eval_fraction": 0.25, "learning_rate": 1e-3, "logging_steps": 50}  # so that no step is logged
    fields = on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(16)), run, **more)
    run.mkdir()
    (run / STOP).write_text("for good\n")
    assert train_dpo.main(fields) == 75
    printed = capsys.readouterr()
    assert "a save takes longer than --signal; submit with --signal=B:USR1@" in printed.err
    assert re.search(r"reward accuracy +0.50, all ties$", printed.out, re.MULTILINE)  # and no later evaluation
    assert "<th>before, step 0</th></tr>" in write_report(run).read_text()
    assert read_status(run)["for_good"] is True
    calibration = read_file(run / DATA)["calibration"]
    mark = run / "checkpoint-1" / COMPLETE
    complete = json.loads(mark.read_text())
    mark.write_text(json.dumps(complete | {"world_size": 4}))
    assert train_dpo.main(fields) == 2
    assert "was written by 4 process(es), but this run has 1" in error_line(capsys.readouterr().err)
    assert read_status(run)["state"] == "stopped"

    mark.write_text(json.dumps(complete))
    monkeypatch.setenv("SFM_GRACE_SECONDS", "600")
    assert train_dpo.main(fields) == 0
    assert read_file(run / DATA)["calibration"] == calibration
    evals = {entry["step"]: entry["eval_loss"] for entry in logged(run, "eval_loss")}
    assert set(evals) == {0, 3} and evals[3] < evals[0] == pytest.approx(0.6931, abs=1e-4)
    assert f"{evals[3]:.3f}" in capsys.readouterr().out.rpartition("held out")[2]

    (run / "README.md").unlink()
    (run / STOP).touch()
    assert train_dpo.main(fields) == 0
    assert "already done" in capsys.readouterr().out
    assert (run / "README.md").is_file() and not (run / STOP).exists()

    weights = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").write_bytes(weights[:-1])
    assert train_dpo.main(fields) == 2
    error = error_line(capsys.readouterr().err)
    remedy = f"remove {run}/status.json and run its command again, which saves the model again from {run}/checkpoint-3"
    assert "has a damaged model.safetensors" in error and error.endswith(remedy)
    (run / "status.json").unlink()
    (run / ".error.txt.n1.7.partial").touch()  # of a killed process
    (run / "checkpoint-1" / COMPLETE).unlink()  # a rotation was killed
    assert train_dpo.main(fields) == 0
    assert (run / "model.safetensors").read_bytes() == weights
    assert not list(run.glob(".*.partial")) and not (run / "checkpoint-1").exists()


def test_a_folder_that_is_removed_at_the_end_is_one_line(run, monkeypatch, capsys, environment):
    (run / "report.html").unlink()
    monkeypatch.setattr(training_run, "write_report", shutil.rmtree)
    assert train_dpo.main(["--config", str(run / RESOLVED_CONFIG), "--output_dir", str(run)]) == 1
    assert error_line(capsys.readouterr().err).endswith(f"{run}: was removed or moved during the run; start it again")


UNWRITABLE = {errno.ENOSPC: "free space", errno.EACCES: "give yourself write permission"}
UNWRITABLE[errno.EROFS] = "use another node, or have it mounted read-write"
LOADING_FAILS = [
    (MemoryError("9 GiB"), 2, "out of memory in loading"),
    (OSError(errno.EIO, "Input/output error", "/x"), 1, "Input/output error; check its disk or file server, and run"),
]


@pytest.mark.parametrize(("number", "remedy"), UNWRITABLE.items())
def test_a_disk_that_takes_nothing_more_is_one_line(tmp_path, monkeypatch, capsys, number, remedy, environment):
    error = OSError(number, os.strerror(number), "/disk/file")

    def fail(*args, **options):
        raise error

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    monkeypatch.setattr(train_dpo, "identify_models", fail)
    monkeypatch.setattr(folder, "write_json", fail)
    fields = f"--model_name_or_path m --dataset_name d.jsonl --use_cpu --output_dir {tmp_path / 'run'}"
    assert train_dpo.main(fields.split()) == 1
    line = f"error: /disk/file: {error.strerror}; {remedy}, and run the same command again to resume\n"
    assert capsys.readouterr().err == line
    assert read_status(tmp_path / "run")["state"] == "failed"  # written into the old file


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


def test_a_thread_may_train_and_its_children_end_by_sigterm(signals, capsys):
    signals()
    with ThreadPoolExecutor(1) as pool:  # where Python refuses to set a handler
        assert pool.submit(train_dpo.main, ["--beta", "0"]).result() == 2
    assert error_line(capsys.readouterr().err)
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
    write_json = folder.write_json
    fields = on_cpu(tiny_folder("llama"), write_rows("p.jsonl", pairs(16)), run, save_steps=1)
    for number, step in ((signal.SIGTERM, 2), (signal.SIGINT, 3)):
        signals()

        def interrupt(self, args, state, *rest, number=number, step=step, **kwargs):
            if state.global_step == step:
                signal.raise_signal(number)

        def write(path, value, number=number, **options):
            if value.get("state") == "stopped":
                signal.raise_signal(number)  # once more
            write_json(path, value, **options)

        with monkeypatch.context() as patch:
            patch.setattr(ProgressLine, "on_step_begin", interrupt)
            patch.setattr(folder, "write_json", write)
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


def test_a_library_s_error_is_one_line_with_its_traceback_in_error_txt(tmp_path, monkeypatch, environment, capsys):
    run = tmp_path / "run"
    seen = []

    def fail(*args):
        seen.append(describe_run(run, None, time.time()))
        with user_input("model m", "choose another"):
            raise KeyError("no such model")

    monkeypatch.setattr(train_dpo, "identify_models", fail)
    fields = f"--model_name_or_path m --dataset_name d.jsonl --use_cpu --output_dir {run}".split()
    for _ in range(2):  # error.txt does not block the folder
        assert train_dpo.main(fields) == 2
        assert (seen[-1]["state"], seen[-1]["message"]) == ("running", "loading")  # status.py sees it at once
        assert error_line(capsys.readouterr().err) == "error: model m: KeyError: 'no such model'; choose another"
        status = read_status(run)
        assert (status["state"], status["exit_code"], status["message"][:8]) == ("failed", 2, "model m:")
        assert "in fail\n    raise KeyError" in (run / "error.txt").read_text()
    monkeypatch.setattr(train_dpo, "identify_models", lambda *args: (_ for _ in ()).throw(UserError("a mistake")))
    assert train_dpo.main(fields) == 2 and not (run / "error.txt").exists()
    run = tmp_path / "refused before its data are read"
    fields += ["--output_dir", str(run), "--resume_from_checkpoint", str(tmp_path)]
    assert train_dpo.main(fields) == 2 and not run.exists()
    assert "was not fully written" in capsys.readouterr().err

    def be_second(folder):  # another start has made it since this one found none
        first.append(Lease(folder / LOCK))
        assert first[0].take()
        return take_folder(folder)

    first = []
    monkeypatch.setattr(training_run, "take_folder", be_second)
    assert train_dpo.main(fields) == 2 and (run / LOCK).exists()
    first[0].release()


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
