"""The node check over real process groups on CPU; what nvidia-smi would print is read from text."""

import os
import re
import subprocess
import sys

import pytest

from sfm_dpo.health import node_check
from sfm_dpo.health.node_check import UNHEALTHY, check_folder, check_matmul
from tests.e2e.runs import ROOT, clean_environment, free_port


def check(tmp_path, ranks: int = 2, env: list[dict] | None = None) -> tuple[list[int], str]:
    """Exit codes and output of `ranks` processes, each with its own addition to the environment."""
    clean = clean_environment(tmp_path / "hf") | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    clean |= {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "sfm_dpo.health.node_check", "--output_dir", str(tmp_path / "run")]
    processes = []
    for rank in range(ranks):
        mine = clean | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank + 1}"} | (env[rank] if env else {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=mine, **pipes))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [process.returncode for process in processes], "".join(outputs)


@pytest.mark.slow
def test_healthy_nodes_leave_nothing_behind(tmp_path):
    codes, output = check(tmp_path)
    assert codes == [0, 0], output
    assert output.splitlines()[-1] == "health: 2 node(s), 2 rank(s) fine"
    assert [p for folder in ("run", "hf") for p in (tmp_path / folder).iterdir()] == []


@pytest.mark.slow
def test_findings_of_all_ranks_are_reported_and_the_good_node_is_not_excluded(tmp_path):
    lost = {"SLURM_GPUS_ON_NODE": "4", "DS_ACCELERATOR": "cuda", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": ""}
    env = [{}, {"HF_HOME": "/proc/hf"}, {"HF_HOME": str(tmp_path / "local")}, lost]
    codes, output = check(tmp_path, 4, env)
    assert codes == [UNHEALTHY] * 4, output
    assert "unhealthy n2: HF_HOME /proc/hf cannot be written: " in output
    assert f"unhealthy n3: HF_HOME {tmp_path}/local is not the first node's: all nodes must share the folder" in output
    assert "unhealthy n4: 0 GPU(s) for 4 processes" in output  # it is not taken for a node without GPUs
    assert "submit again with --exclude=n2,n3,n4, or SKIP_HEALTHCHECK=1 to train anyway" in output
    assert "n1" not in output and "Traceback" not in output


@pytest.mark.slow
def test_a_rank_that_never_comes(tmp_path):
    wait = "import sfm_dpo.health.node_check as h, sys; h.JOIN_SECONDS = 3; sys.exit(h.main(sys.argv[1:]))"
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, "-c", wait, "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == UNHEALTHY, done.stderr
    assert re.search(r"unhealthy \S+: rank 0 could not reach the other ranks: ", done.stderr)


def test_alone_without_a_launcher(tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the check sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert node_check.main(["--output_dir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "health: 1 node(s), 1 rank(s) fine\n"


@pytest.mark.parametrize(
    ("smi", "findings"),
    [
        ("0, 4, 0\n1, 521, [N/A]\n", []),
        ("0, 81234, 0\n1, [N/A], [Not Supported]\n", ["GPU 0 has 81,234 MiB in use before the run"]),
        ("0, 4, 0\n1, 4, 2\n", ["GPU 1 has 2 uncorrected ECC errors"]),
        ("", ["nvidia-smi fails"]),
    ],
)
def test_what_nvidia_smi_said_before_the_ranks(monkeypatch, smi, findings):
    monkeypatch.setattr(node_check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(node_check.torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("SMI_BEFORE_RANKS", smi)
    assert node_check.check_gpus(1) == findings


def test_a_full_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    assert check_folder("output_dir", tmp_path / "new" / "deep") == []
    monkeypatch.setattr(node_check, "MIN_FREE_GIB", 1e9)
    assert re.fullmatch(r"TMPDIR \S+ has [\d.]+ GiB free, 1e\+09 GiB are needed", check_folder("TMPDIR", tmp_path)[0])


def test_a_device_that_computes_garbage(monkeypatch):
    assert check_matmul() == []
    full = node_check.torch.full
    monkeypatch.setattr(node_check.torch, "full", lambda shape, value, **kwargs: full(shape, value + 1, **kwargs))
    assert check_matmul() == ["CPU: 262,144 wrong values in a matmul"]
