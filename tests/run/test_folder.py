"""A run's folder: who may use it, status.json in one piece, and no secrets in what is written down."""

import errno
import json
import os
import resource
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from scripts import check_config
from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import parse_config
from sfm_dpo.run import folder
from sfm_dpo.run.checkpoint import mark_complete
from sfm_dpo.run.folder import ENVIRONMENT, LOG, STATUS, describe, make_folder, read_status, write_end, write_status
from sfm_dpo.run.start import choose_start
from tests.run.test_lock import write_lock


def needed(output_dir) -> list[str]:
    return ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--use_cpu", "--output_dir", str(output_dir)]


def config(output_dir, *cli):
    return parse_config([*needed(output_dir), *cli])


def is_to_be_trained(output_dir, *cli) -> bool:
    make_folder(output_dir)
    return choose_start(config(output_dir, *cli)).trains


def test_a_new_or_empty_folder_or_one_with_an_earlier_mistake_alone_is_free(tmp_path):
    assert is_to_be_trained(tmp_path / "new" / "deep")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".nfs001").touch()
    assert is_to_be_trained(tmp_path / "empty")
    for state in ("failed", "stopped", "running"):  # Ctrl-C while its data were read; killed then
        write_status(tmp_path / "empty", state, 2, "no such file")
        assert is_to_be_trained(tmp_path / "empty", "--seed", "1")
    for state in ("failed", "refused", "running"):  # before the first step, for instance on a wrong LoRA target
        describe(config(tmp_path / "early"))
        write_status(tmp_path / "early", state)
        (tmp_path / "early" / LOG).write_text('{"step": 0, "eval_loss": 0.7}\n')
        assert is_to_be_trained(tmp_path / "early", "--seed", "1")


def test_output_dir_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for impossible in (tmp_path / "link", tmp_path / "file" / "run", "/proc/run"):
        with pytest.raises(UserError, match=r"cannot be written: .*; choose another"):
            make_folder(Path(impossible))
    with pytest.raises(UserError, match="give yourself read and write permission, or choose another output_dir"):
        make_folder(Path("/sys/run"))


def test_status_holds_the_contract(tmp_path):
    assert read_status(tmp_path) == {}
    write_status(tmp_path, "stopped", 75, "on request", step=30, checkpoint="checkpoint-30")
    status = read_status(tmp_path)
    assert datetime.now(UTC) - datetime.fromisoformat(status.pop("time")) < timedelta(seconds=60)
    assert (status.pop("pid"), status.pop("job")) == (os.getpid(), os.environ.get("SLURM_JOB_ID"))
    expected = {"state": "stopped", "exit_code": 75, "message": "on request", "step": 30}
    kept = {"loss": None, "margin": None, "pairs_per_second": None}
    kept |= {"task": None, "log": None, "trained": None}
    assert status == expected | {"checkpoint": "checkpoint-30"} | kept
    write_status(tmp_path, "running", loss=0.5)
    write_status(tmp_path, "done", 0)
    assert read_status(tmp_path)["loss"] == 0.5


def test_the_verdict_is_written_on_a_full_disk_too(tmp_path, monkeypatch):
    write_status(tmp_path, "running", step=3)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write_status(tmp_path, "failed", 1, "disk full")
    assert read_status(tmp_path)["message"] == "disk full"
    assert [p.name for p in tmp_path.iterdir()] == [STATUS]


def test_a_failed_write_leaves_the_old_status(tmp_path):
    write_status(tmp_path, "done", 0, open=[])
    before = read_status(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # not even in its place
    try:
        write_status(tmp_path, "failed", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_status(tmp_path) == before


@pytest.mark.parametrize("status", [None, '{"state": "runn', '{"state": "failed", "exit_code": 1, "message": "full"}'])
def test_a_saved_model_is_known_by_its_mark(tmp_path, status):
    if status:
        (tmp_path / STATUS).write_text(status)
    mark_complete(tmp_path, {"step": 8, "open": ["pushed", "reported"]}, [])
    found = read_status(tmp_path)
    assert (found["state"], found["exit_code"], found["step"]) == ("push_failed", 5, 8)
    assert found["open"] == ["pushed", "reported"] and "not pushed yet" in found["message"]
    write_end(tmp_path, [])
    assert json.loads((tmp_path / STATUS).read_text()) == read_status(tmp_path)
    assert (read_status(tmp_path)["state"], read_status(tmp_path)["step"]) == ("done", 8)


def test_every_start_is_kept_with_its_step_and_job_and_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(folder, "PROJECT", tmp_path)
    for command in ("init --quiet", "remote add origin https://user:canary@github.com/lab/fork"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    (tmp_path / STATUS).write_text('{"trained": "2026-01-01T00:00:00+00:00"}')
    expected = [("4711", "0", 0), ("4711", "1", 4), ("4711", "2", 6)]
    for _, restart, step in expected:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        describe(config(tmp_path), step)
    environment = json.loads((tmp_path / ENVIRONMENT).read_text())
    assert [(s["job"], s["restart"], s["step"]) for s in environment["starts"]] == expected
    assert all(datetime.fromisoformat(s["time"]) for s in environment["starts"])
    assert [s.get("end") for s in environment["starts"]] == ["2026-01-01T00:00:00+00:00"] * 2 + [None]
    assert environment["slurm"]["SLURM_JOB_ID"] == "4711"
    assert environment["git_remote"] == "https://github.com/lab/fork"
    assert environment["versions"]["trl"] and environment["versions"]["torch"]


def test_w_and_b_knows_all_starts_of_a_run_as_one(tmp_path, monkeypatch, environment):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for name in ("run", "run", "other"):
        os.environ.pop("WANDB_RUN_ID", None)
        describe(config(tmp_path / name, "--report_to", "wandb"), {})
        ids.append(os.environ["WANDB_RUN_ID"])
    assert ids[0] == ids[1] != ids[2] and os.environ["WANDB_RESUME"] == "allow"
    os.environ["WANDB_RUN_ID"] = "mine"  # the user's wins
    describe(config(tmp_path / "run", "--report_to", "wandb"), {})
    assert json.loads((tmp_path / "run" / ENVIRONMENT).read_text())["wandb_run_id"] == "mine"


def test_no_secret_is_written_down(tmp_path, monkeypatch):
    secrets = ["hf_canary3", "wandb_canary", "-----BEGIN KEY-----", "second line"]
    monkeypatch.setenv("HF_TOKEN", secrets[0])
    monkeypatch.setenv("WANDB_API_KEY", secrets[1])
    monkeypatch.setenv("PRIVATE_KEY", "\n".join(secrets[2:]))
    monkeypatch.setattr(sys, "argv", ["train_dpo.py", f"--run_name={secrets[1]}", "--seed", "1"])
    texts = ["--run_name", secrets[1], "--eval_command", f"curl -H {secrets[0]} {{checkpoint}} {{out}}"]
    describe(config(tmp_path, *texts), {"sources": ["d.jsonl"]})
    write_status(tmp_path, "failed", 2, str(UserError("\n".join(secrets[2:]))))
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert not [secret for secret in secrets if secret in written]
    command = json.loads((tmp_path / ENVIRONMENT).read_text())["command"]
    assert command[1:] == ["train_dpo.py", "--run_name=***", "--seed", "1"]
    assert folder.read_file(tmp_path / folder.RESOLVED_CONFIG)["seed"] == 42


def test_the_check_of_the_batch_scripts_leaves_the_folder_to_nobody(tmp_path, monkeypatch, environment, capsys):
    run = tmp_path / "run"
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "complete.json").write_text(json.dumps({"world_size": 2, "files": {}}))
    fields = [*needed(run), "--resume_from_checkpoint", str(checkpoint)]
    monkeypatch.setenv("LAUNCH", "cpu")  # two processes
    assert check_config.main(["4", *fields]) == 2
    assert "was written by 2 process(es), but this run has 4" in capsys.readouterr().err
    assert check_config.main(fields) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"output_dir: {run}"
    assert not list(run.iterdir())
    write_lock(run, job="7", uid=-1, time="noon")
    assert check_config.main(["2", *fields]) == 2
    assert f"output_dir {run}: locked by job 7, process 1 on n1 since noon; " in capsys.readouterr().err
