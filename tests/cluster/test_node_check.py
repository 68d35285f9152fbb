"""The node check over real process groups on CPU."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from sfm_dpo.cluster import node_check
from sfm_dpo.cluster.node_check import check_compiler, check_device
from sfm_dpo.common.errors import NODE_CHECK_FAILED
from tests.e2e.runs import ROOT, clean_environment, free_port
from tests.toolbox import in_grid


def check(tmp_path, ranks: int = 2, env=None, change: str = "", come=None) -> tuple[list[int], str]:
    """Exit codes and output of `ranks` processes, or of those that `come`, each with its own addition to the
    environment; `change`: code that runs in each before the check, with the module as h."""
    clean = clean_environment(tmp_path / "hf") | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    clean |= {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    program = f"import sfm_dpo.cluster.node_check as h, sys\n{change}\nh.run(sys.argv[1:])"
    start = ["-c", program] if change else ["-m", node_check.__name__]
    command = [sys.executable, *start, "--output_dir", str(tmp_path / "run")]
    processes = []
    for rank in come or range(ranks):
        mine = clean | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank + 1}"} | (env[rank] if env else {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=mine, **pipes))
    outputs = [process.communicate()[0] for process in processes]
    return [process.returncode for process in processes], "".join(outputs)


@pytest.mark.slow
def test_bad_nodes_are_excluded_and_the_good_one_is_not(tmp_path):
    lost = {"SLURM_GPUS_ON_NODE": "4", "DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    codes, output = check(tmp_path, 3, [{}, {"HF_HOME": "/proc/hf"}, lost])
    assert codes == [NODE_CHECK_FAILED] * 3, output
    assert "unhealthy n2: HF_HOME /proc/hf cannot be written: " in output
    assert "unhealthy n3: GPU 0 is missing: " in output  # it is not taken for a node without GPUs
    assert "submit again with --exclude=n3, or SKIP_HEALTHCHECK=1 to train anyway" in output  # n2 is not to blame
    assert "unhealthy n1" not in output and "Traceback" not in output


@pytest.mark.slow
def test_a_node_with_a_folder_of_its_own(tmp_path):
    codes, output = check(tmp_path, 2, [{}, {"HF_HOME": str(tmp_path / "local")}])
    assert codes == [NODE_CHECK_FAILED] * 2, output
    assert f"unhealthy n2: HF_HOME {tmp_path}/local is not shared with the first node; choose a shared" in output
    assert "correct this and submit again, or SKIP_HEALTHCHECK=1" in output and "--exclude" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("came", "expected"),
    [
        (0, "unhealthy n2: no process has reached the first node\nerror: submit again with --exclude=n2, or"),
        in_grid(1, "unhealthy n2: rank 1 could not finish the check: .*\nerror: correct this and submit again, or"),
    ],
)
def test_a_node_that_never_comes_is_the_one_to_exclude(tmp_path, came, expected):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    codes, output = check(tmp_path, 2, [slurm, slurm], "h.JOIN_SECONDS = 3", come=[came])
    assert codes == [NODE_CHECK_FAILED], output
    assert re.search(expected, output), output


@pytest.mark.slow
def test_a_rank_whose_all_reduce_fails_says_why_itself(tmp_path):
    """Rank 0 only learns that it did not come."""
    broken = "h.REDUCE_SECONDS = 3\ndef check_all_reduce(folders, store):\n    raise RuntimeError('no such NIC')\n"
    codes, output = check(tmp_path, 2, change=f"{broken}if h.RANK: h.check_all_reduce = check_all_reduce")
    assert codes == [NODE_CHECK_FAILED] * 2, output
    assert "unhealthy n2: rank 1 could not finish the check: no such NIC" in output
    assert output.count("correct this and submit again") == 1 and "--exclude" not in output


@pytest.mark.slow
def test_healthy_nodes_leave_nothing_behind(tmp_path):
    codes, output = check(tmp_path, 3, [{}, {"SLURMD_NODENAME": "n1"}, {}])
    assert codes == [0] * 3, output
    assert "node check: 2 node(s), 3 rank(s) are healthy" in output
    assert not [path for folder in ("run", "hf") for path in (tmp_path / folder).iterdir()]


def test_a_device_that_computes_garbage(monkeypatch):
    assert check_device() == []
    full = node_check.torch.full
    monkeypatch.setattr(node_check.torch, "full", lambda shape, value, **kwargs: full(shape, value + 1, **kwargs))
    assert check_device() == [("CPU 0: a matmul gave 262,144 wrong values", True)]


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")
def test_triton_needs_a_c_compiler_and_python_h(monkeypatch, tmp_path):
    assert check_compiler() == []
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda *args: str(tmp_path))
        assert "Python.h: No such file or directory" in check_compiler()[0].text
    monkeypatch.setenv("PATH", "")
    [fault] = check_compiler()
    assert "No such file or directory: 'gcc'; load a module with gcc and Python.h in scripts/site.sh" in fault.text
    assert not fault.of_node  # other nodes lack it too
