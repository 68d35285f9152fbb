"""Ends of a script's main, tables in plain text, and GPUs that torch does not see."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from sfm_dpo.common import distributed
from sfm_dpo.common.cli import command, reads_runs
from sfm_dpo.common.distributed import explain_missing_gpus
from sfm_dpo.common.errors import GuardStopped, PreflightRefused, UserError
from sfm_dpo.common.files import PROJECT, format_table
from sfm_dpo.config.fields import parse_config


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        (None, 0, ""),
        (3, 3, ""),
        (PreflightRefused("too bad: hf_" + "a" * 34), 3, "error: too bad: ***\n"),
        (PermissionError(13, "Permission denied", "/a"), 2, "error: /a: Permission denied; ask its owner\n"),
        (OSError(5, "Input/output error", "/a"), 2, "error: /a: Input/output error; check its disk or file server\n"),
    ],
)
def test_command_returns_the_exit_code(capsys, end, code, line):
    @command
    def main(argv):
        if isinstance(end, BaseException):
            raise end
        return end

    assert main([]) == code
    assert capsys.readouterr() == ("", line)


def test_the_option_that_a_remedy_names_can_be_copied_into_a_shell():
    end = GuardStopped("collapse", "lower beta", step=5, checkpoint="my runs/checkpoint-4")
    assert "(--resume_from_checkpoint 'my runs/checkpoint-4') in another output_dir" in str(end)


def test_a_command_that_reads_runs_reports_any_exception_in_one_line(capsys):
    @command
    @reads_runs
    def main(argv):
        raise KeyError("step")

    assert main(["outputs/a", "--json"]) == 2
    line = "error: outputs/a --json: KeyError: 'step'; check the options, and whether a file of the run is damaged\n"
    assert capsys.readouterr() == ("", line)


RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (RANK_0, None),
        ({"MASTER_ADDR": "node", "RANK": "0", "WORLD_SIZE": "1", "PMI_SIZE": "1"}, ""),  # of one process
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: set without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; unset"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1 PMI_SIZE=2: set without RANK, "),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED=true: set without RANK, "),
    ],
)
def test_a_process_is_a_rank_or_not_from_its_start(monkeypatch, environment, given, error):
    monkeypatch.setattr(os, "environ", dict(given))
    if error:
        with pytest.raises(UserError, match=error):
            distributed.settle_launch(by_ranks=True)
        distributed.settle_launch(by_ranks=False)
        assert "MASTER_ADDR" not in os.environ or distributed.world_size() == 1
    else:
        distributed.settle_launch(by_ranks=True)
    assert distributed.world_size() == (2 if error is None else 1) and "PMI_SIZE" not in os.environ


def test_a_variable_without_a_reader_is_named_at_the_start(tmp_path):
    env = {"TRANSFORMERS_CACHE": "/old", "HF_API_TOKEN": "t", "HF_TOKEN": "t", "WORLD_SIZE": "2"}
    code = "import sfm_dpo; sfm_dpo.setup(); sfm_dpo.setup(by_ranks=True); print('one process')"
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=PROJECT, capture_output=True, text=True)
    warning = "warning: TRANSFORMERS_CACHE: no library reads this variable any more; set HF_HOME\n"
    assert (result.stdout, result.stderr) == ("one process\n", 2 * warning)


def test_what_says_nothing_is_not_logged(caplog):
    dropped = {"DeepSpeed": "Setting accelerator to CPU. If", "huggingface_hub.utils._http": "Retrying in 1s"}
    for name, text in dropped.items():
        logging.getLogger(name).warning(text)
        logging.getLogger(name).warning("another")
    assert {record.getMessage() for record in caplog.records} <= {"another"}


def test_columns_are_aligned_and_short_rows_are_filled():
    table = format_table([(1, "ab", "x"), (100, "c")], ("n", "name"), align="rl")
    assert table == "    n  name\n    1  ab    x\n  100  c"
    assert format_table([("a", 1), ("bb", 20)], align="lr", indent=0) == "a    1\nbb  20"
    assert format_table([]) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_a_gpu_that_slurm_gave_and_torch_does_not_see_is_named(monkeypatch, tmp_path):
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    fields = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", str(tmp_path)]
    assert explain_missing_gpus() is None
    assert parse_config(fields, training=False).train.use_cpu
    monkeypatch.setattr(distributed, "DRIVER", tmp_path)
    with pytest.raises(UserError, match="torch does not see the GPU of this node"):
        parse_config(fields)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    line = r"^Slurm gave 4 GPU\(s\) .* \(.*(compiled with CUDA|NVIDIA driver|CUDA GPUs).*\).*--use_cpu true"
    with pytest.raises(UserError, match=line):
        parse_config([*fields, "--bf16", "true"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert explain_missing_gpus() is None


@pytest.mark.parametrize(("given", "seen"), [(None, "0"), ("MIG-a1,MIG-b2", "MIG-a1"), ("", "")])
def test_a_command_of_one_process_sees_one_gpu_when_torch_starts(given, seen, tmp_path):
    (tmp_path / "torch.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES']); raise SystemExit")
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {"PYTHONPATH": str(tmp_path)} | ({} if given is None else {"CUDA_VISIBLE_DEVICES": given})
    command = [sys.executable, PROJECT / "scripts/preflight.py", "--help"]
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == f"{seen}\n"
