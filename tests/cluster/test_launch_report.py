"""The last line under a launcher is that of the rank which failed first; two real ranks."""

import json
import os
import platform
import subprocess
import sys
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sfm_dpo.cluster import launch
from sfm_dpo.common.files import PROJECT
from sfm_dpo.run import folder
from sfm_dpo.run.folder import has_failed, message_of_rank, read_status, write_status
from sfm_dpo.training_run import TrainingRun

HOST = platform.node()
RANKS = """
import os, signal, sys, time
assert os.environ["NCCL_DEBUG"] == "INFO", "the user's"
assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == sys.argv[1] + "/stacks/collectives-"
from pathlib import Path
from sfm_dpo.run.folder import message_of_rank, write_status

run, how, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
if rank == 0:
    write_status(run, "running", step=3)
    (run / "began").touch()
while not (run / "began").exists():
    time.sleep(0.1)
if rank == 1 and how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and how == "crash":
    write_status(run, "failed", 1, message_of_rank(run, "ValueError: no"), any_rank=True)
    raise ValueError("no")
time.sleep(30)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "end"), [("killed", " was killed by SIGKILL"), ("crash", ": ValueError: no")])
def test_the_last_line_is_the_failed_ranks(tmp_path, how, end):
    last = f"error: rank 1 on {HOST}{end}"
    (tmp_path / "ranks.py").write_text(RANKS)
    launch = ["--config_file", "configs/accelerate/cpu.yaml", "--num_processes", "2", "--main_process_port", "0"]
    command = [sys.executable, "-m", "sfm_dpo.cluster.launch", tmp_path, *launch, tmp_path / "ranks.py", tmp_path, how]
    env = os.environ | {"PYTHONPATH": str(PROJECT), "DS_ACCELERATOR": "cpu", "NCCL_DEBUG": "INFO"}
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, last), done.stderr
    assert done.stderr.count("Traceback") == (how == "crash"), "the rank's own, none of the launcher"
    status = read_status(tmp_path)
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert f"error: {status['message']}" == last and status["step"] == (3 if how == "killed" else None)


def test_the_rank_that_failed_first_is_named_not_the_lowest(tmp_path, monkeypatch, environment):
    failures = {rank: ProcessFailure(rank, pid=1, exitcode=-9, error_file="<N/A>") for rank in (0, 2)}
    failures[0].timestamp += 1
    monkeypatch.setattr(launch, "launch_command_parser", Mock())
    monkeypatch.setattr(launch, "launch_command", Mock(side_effect=ChildFailedError("train", failures)))
    assert launch.main([str(tmp_path)]) == 1
    assert read_status(tmp_path)["message"] == f"rank 2 on {HOST} was killed by SIGKILL"
    write_status(tmp_path, "done", 0)
    assert launch.main([str(tmp_path)]) == 1
    assert read_status(tmp_path)["state"] == "done", "a start in which only steps of the end were left"


def test_a_rank_speaks_where_rank_0_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SAID_SECONDS", 0)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert message_of_rank(tmp_path, "no such field") == "no such field"
    assert json.loads((tmp_path / "error.json").read_text())["message"] == "no such field"
    monkeypatch.setenv("RANK", "3")
    write_status(tmp_path, "running", any_rank=True)
    assert message_of_rank(tmp_path, "no file") == f"rank 3 on {HOST}: no file"
    assert message_of_rank(None, "no file") == f"rank 3 on {HOST}: no file"  # before there is a process group
    write_status(tmp_path, "failed", 2, "no file", any_rank=True)
    assert has_failed(tmp_path) and message_of_rank(tmp_path, "no file") is None
    monkeypatch.setattr(folder, "STARTED", "2999-01-01T00:00:00+00:00")  # that was an earlier start
    assert not has_failed(tmp_path) and message_of_rank(tmp_path, "no file")


def test_the_first_cause_is_kept_though_its_rank_cannot_write_it(tmp_path, monkeypatch, process_group, capsys):
    """Rank 0 ends because rank 1 has ended, in one line: that of rank 1, which only the store of the ranks has."""
    monkeypatch.setattr(folder, "SAID_SECONDS", 0)
    monkeypatch.setenv("RANK", "1")
    assert message_of_rank(None, "disk full") == f"rank 1 on {HOST}: disk full"
    monkeypatch.setenv("RANK", "2")
    assert message_of_rank(None, "disk full") is None
    monkeypatch.setenv("RANK", "0")
    with TrainingRun() as run:
        run.output_dir = run.folder = tmp_path
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1\nException raised"
        )
    assert capsys.readouterr().err == f"error: rank 1 on {HOST}: disk full\n"
    assert read_status(tmp_path)["message"] == f"rank 1 on {HOST}: disk full"
