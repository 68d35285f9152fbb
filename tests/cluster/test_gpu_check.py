"""The GPU check: its order, its table, its verdicts. All of it on two CPU processes: tests/slurm/test_submit.py."""

import json
import sys
from typing import Any

import check_gpu
import psutil
import pytest
from huggingface_hub import constants

from sfm_dpo.cluster.gpu_check import LAUNCHES, GpuCheck
from sfm_dpo.common.files import write_json
from tests.tiny_models import tiny_config
from tests.toolbox import error_line, wait_for

NOISE = 0.008  # nats; 4 x beta x this is 0.16, and with 16 responses in a batch 0.04


class Trained(GpuCheck):
    """Instead of training, a run has the losses that are given; the gradient norm is 10."""

    losses: dict[str, float]
    fields: dict[str, dict]  # of each run

    def train(self, run: str, launch: str, **fields: Any) -> str:
        folder = self.folder / run
        folder.mkdir()
        if run not in self.losses:
            return self.call("crash", "bash", "-c", "echo working; echo 'error: no such thing' >&2; exit 3")
        steps = [{"loss": loss, "grad_norm": 10.0} for loss in (0.6931, self.losses[run])]
        write_json(folder / "trainer_state.json", {"log_history": [*steps, {"eval_loss": 1.0}]})
        write_json(folder / "data.json", {"calibration": {"noise": NOISE}})
        (folder / "model.safetensors").touch()
        if run == "ZeRO-2":
            (folder / f"checkpoint-{self.max_steps // 2}").mkdir()
            (folder / f"checkpoint-{self.max_steps}").mkdir()
        self.fields[run] = fields
        return f"noise of {run}"


@pytest.fixture
def check(tiny_folder, tmp_path) -> Trained:
    recipe = ["--model_name_or_path", str(tiny_folder("olmo3")), "--dataset_name", "none.jsonl"]
    recipe += ["--max_length", "1000000"]
    check = Trained(tmp_path / "check-gpu", recipe, 2, on_gpu=False)
    check.losses = dict.fromkeys([*LAUNCHES, "full-model"], 0.69)
    check.fields = {}
    return check


def test_each_launcher_is_compared_with_one_process_within_its_noise(check, capsys):
    check.losses |= {"ZeRO-2": 0.72, "FSDP2": 0.735, "ZeRO-3": float("nan"), "resumed": 0.75}
    (check.folder / "ZeRO-2").mkdir(parents=True)  # left by an earlier check
    rows = {row["check"]: row for row in check.run()}
    passed = [rows[name]["result"] for name in (*LAUNCHES, "full-model")]
    assert passed == ["pass", "pass", "FAIL", "FAIL", "pass", "pass", "pass"]
    assert rows["FSDP2"]["found"].startswith("loss within 4.5e-02 (4.0e-02 allowed), gradient norm within 0.0% (6.2%)")
    assert rows["resumed"]["found"].startswith("loss within 3.0e-02")  # of ZeRO-2's
    assert rows["full-model"]["found"] == "noise of full-model" in capsys.readouterr().out
    assert json.loads((check.folder / "checks.json").read_text()) == list(rows.values())
    assert not list(check.folder.glob("full-model/*.safetensors")) and list(check.folder.glob("single/*.safetensors"))
    left = [folder.name for folder in check.folder.glob("ZeRO-2/checkpoint-*")]
    assert left == [check.fields["resumed"]["resume_from_checkpoint"].name]  # a disk may have no room for both
    positions = tiny_config("olmo3").max_position_embeddings
    assert check.fields["full-model"]["max_length"] == positions  # the recipe has more


def test_a_run_that_ends_badly_is_a_fail_and_the_others_are_checked(check):
    del check.losses["ZeRO-2"]
    rows = {row["check"]: row for row in check.run()}
    assert rows["ZeRO-2"]["found"].startswith("RuntimeError: exit code 3: error: no such thing (")
    assert [row["result"] for row in rows.values()] == ["pass", "FAIL", "pass", "pass", "pass", "skip", "pass"]


def test_a_run_that_aborts_or_lasts_too_long_says_so_and_leaves_no_rank(check, monkeypatch):
    check.folder.mkdir()
    with pytest.raises(RuntimeError, match="Fatal Python error: Aborted"):
        check.call("aborts", sys.executable, "-X", "faulthandler", "-c", "import os; os.abort()")
    monkeypatch.setattr("sfm_dpo.cluster.gpu_check.TIMEOUT", 2)
    launcher = "setsid sleep 987 & echo $! > rank; trap 'kill $!; exit 1' TERM; wait"  # as torchrun starts its ranks
    with pytest.raises(RuntimeError, match="exit code 124"):
        check.call("hangs", "bash", "-c", launcher.replace("rank;", f"{check.folder}/rank;"))
    rank = int((check.folder / "rank").read_text())
    # Nobody may wait for it
    wait_for(lambda: not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE, 10)


def test_data_that_cannot_be_loaded_end_it_before_the_first_check(monkeypatch, check, capsys):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert check_gpu.main(check.recipe) == 2
    assert error_line(capsys.readouterr().err).startswith("error: dataset_name none.jsonl")


def test_runs_have_the_login_and_files_of_their_own(check):
    check.folder.mkdir()
    check.call("env", "bash", "-c", "echo $HF_TOKEN_PATH $HF_HOME")
    assert (check.folder / "env.log").read_text().split() == [constants.HF_TOKEN_PATH, str(check.folder / "hf")]
