"""Stopped: a run ends bitwise where it would have ended. Kills, disks, damage: test_faults.py."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save

from sfm_dpo.run.checkpoint import STOP, why_incomplete
from tests.e2e.runs import ROOT, Place, assert_same_run
from tests.hub_server import Repo
from tests.tiny_models import tiny_model
from tests.toolbox import error_line, logged


@pytest.fixture(scope="session")
def cached(place, tmp_path_factory) -> Place:
    """Pairs, and the cache that scripts/prefetch.py leaves on a login node: a model by its name on the Hub."""
    folder: Path = tmp_path_factory.mktemp("offline")
    shutil.copy(place.folder / "pairs.jsonl", folder)
    repo = folder / "hf/hub/models--somebody--tiny-model"
    commit = "0123456789" * 4
    shutil.copytree(place.model, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    return Place(folder, "somebody/tiny-model", folder / "hf")


# Under ZeRO-2 test_faults.py resumes bitwise, and test_golden.py (bf16), test_launch.py and Slurm's tests stop
def test_stop_file_then_the_same_command_is_bitwise_the_uninterrupted_run(cached, uninterrupted):
    """As on a compute node without a network: a model from the cache, and W&B offline, as one run. The workers that
    load ahead change nothing."""
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(cached.folder), "WANDB_SILENT": "true"}
    fields = {"report_to": "wandb", "dataloader_num_workers": 2, "env": env}
    run = cached.start("stopped", **fields)
    step = run.stop_at(3)
    assert 3 <= step < 8, "the stop must fall into the middle of the run for this test to mean anything"
    assert run.status["checkpoint"] == str(run.folder / f"checkpoint-{step}")
    assert why_incomplete(run.folder / f"checkpoint-{step}") is None
    assert not (run.folder / STOP).exists() and not (run.folder / "model.safetensors").exists()
    assert f"stopped on request at step {step} of 8; run the same command again to resume from" in run.log

    again = cached.start("stopped", **fields).finish()
    assert f"resuming from {run.folder}/checkpoint-{step}" in again.log
    assert "step 1/8" not in again.log
    assert_same_run(again, uninterrupted(1))
    wandb_id = json.loads((run.folder / "environment.json").read_text())["wandb_run_id"]
    folders = sorted((cached.folder / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in folders] == [wandb_id] * 2


def shards(place: Place) -> dict[Path, int]:
    """The shards of the reference cache and when each was written, in ns."""
    found = sorted(place.hf_home.glob("sfm_dpo/reference/*/*.safetensors"))
    return {path: path.stat().st_mtime_ns for path in found}


def test_stop_file_during_the_reference_pass_keeps_its_shards(place, uninterrupted, train_here, tmp_path):
    apart = Place(place.folder, place.model, tmp_path / "hf")
    run = apart.start("reference")
    assert run.until(lambda: len(shards(apart)) >= 3)
    (run.folder / STOP).touch()
    assert run.wait() == 75, run.log[-4000:]
    kept = shards(apart)
    assert 3 <= len(kept) < 64
    assert "stopped on request during the reference pass; its shards are kept in" in run.status["message"]
    assert (run.status["step"], run.status["checkpoint"]) == (0, None)
    assert "; no checkpoint was saved; the same command starts again\n" in run.log

    again = train_here("reference", hf_home=apart.hf_home)
    assert re.search(rf"reference log-probs of the train pairs: {len(kept)} of \d+ shards", again.log)
    assert kept.items() <= shards(apart).items(), "a shard was computed twice"
    assert_same_run(again, uninterrupted(1))


def write_killed(run: Path, step: int) -> None:
    """Leaves a run as a process that was killed after this step: without its model."""
    for name in ("model.safetensors", "complete.json"):
        (run / name).unlink(missing_ok=True)
    (run / "status.json").write_text(json.dumps({"state": "running", "exit_code": None, "step": step, "message": ""}))


def test_max_steps_in_the_middle_of_an_epoch_is_not_exceeded_by_a_start_after_the_last_step(train_here):
    """As transformers 5.24 does. The first start was killed in save_model: the final files are half there."""
    fields = {"max_steps": 3, "loss_type": ["sigmoid_norm", "sft"], "loss_weights": [1, 0.1]}
    first = train_here("middle", **fields)
    weights = first.weights()
    losses = logged(first.folder)
    (first.folder / "trainer_state.json").unlink()
    write_killed(first.folder, 3)
    (first.folder / "model.safetensors").write_bytes(b"half")
    again = train_here("middle", **fields)
    assert again.status["step"] == 3 and logged(again.folder) == losses and again.weights() == weights
    other = train_here("no-step-left", 2, **fields, resume_from_checkpoint=again.folder / "checkpoint-3")
    assert "nothing would be trained in 3 step(s); raise num_train_epochs or max_steps" in error_line(other.log)


# Runs train_dpo.py; rank 1 reads every JSON and YAML file of the run as a stale NFS client may: as empty
STALE_RANK = """
import os, runpy, sys
from pathlib import Path

read = Path.read_text
if os.environ["RANK"] == "1":
    Path.read_text = lambda path, *args, **kwargs: "" if {run!r} in str(path) else read(path, *args, **kwargs)
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.grid
def test_a_rank_that_reads_damaged_files_does_as_rank_0_decides(place, uninterrupted, tmp_path):
    folder = Path(shutil.copytree(uninterrupted(2).folder, place.folder / "stale-rank"))
    script = tmp_path / "train_dpo.py"
    script.write_text(STALE_RANK.format(run=str(folder), script=str(ROOT / "train_dpo.py")))
    (folder / "checkpoint-8/complete.json").unlink()
    write_killed(folder, 8)
    again = place.start(folder.name, 2, script=script).finish()
    assert f"resuming from {folder}/checkpoint-6" in again.log
    assert_same_run(again, uninterrupted(2))
    done = place.start(folder.name, 2, script=script).finish()
    assert "already done" in done.log and "training" not in done.log


@pytest.mark.parametrize("field", ["model_name_or_path", "ref_model_name_or_path"])
def test_other_weights_in_a_model_s_folder_are_refused(place, train_here, tmp_path, field):
    fields = {"max_steps": 2, field: shutil.copytree(place.model, tmp_path / "model")}
    run = train_here(f"swapped-{field}", **fields)
    write_killed(run.folder, 2)
    os.utime(tmp_path / "model/model.safetensors", (0, 0))  # read again, and the same
    train_here(f"swapped-{field}", **fields)
    tiny_model("olmo3", seed=9).save_pretrained(tmp_path / "model")
    write_killed(run.folder, 2)
    line = error_line(train_here(f"swapped-{field}", 2, **fields).log)
    assert f"checkpoint-2: {field}: the model has changed since it was written (hash-" in line
    assert line.endswith("or use another output_dir")


def test_a_run_keeps_the_commit_of_its_model_where_the_branch_has_moved(place, train_here, hub):
    files = {path.name: path.read_bytes() for path in place.model.iterdir()}
    repo = hub.repos["lab/base"] = Repo(False, {"a" * 40: files}, {"main": "a" * 40})
    fields = {"model_name_or_path": "lab/base", "max_steps": 2, "save_steps": 1}
    run = train_here("moved", **fields)
    losses = logged(run.folder)
    weights = run.weights()
    shutil.rmtree(run.folder / "checkpoint-2")
    write_killed(run.folder, 2)
    repo.commits["b" * 40] = files | {"model.safetensors": save(tiny_model("olmo3", seed=9).state_dict())}
    repo.branches["main"] = "b" * 40
    again = train_here("moved", **fields)
    assert json.loads((run.folder / "data.json").read_text())["models"] == {"model_name_or_path": "a" * 40}
    assert logged(again.folder) == losses and again.weights() == weights

    other = tiny_model("olmo3", seed=9)  # whose identity is not the commit of the checkpoint's model
    other.save_pretrained(place.folder / "other")
    tokenizer = [name for name in files if "token" in name or "template" in name]
    for name in tokenizer:
        (place.folder / "other" / name).write_bytes(files[name])
    fields |= {"model_name_or_path": place.folder / "other", "resume_from_checkpoint": run.folder / "checkpoint-2"}
    line = error_line(train_here("from-another", 2, **fields).log)
    assert f"model_name_or_path: the model has changed since it was written ({'a' * 40}" in line


def test_steps_between_logs_and_saves_may_change_in_a_resumed_run(train_here):
    run = train_here("steps", max_steps=4, logging_steps=2, save_steps=2)
    shutil.rmtree(run.folder / "checkpoint-4")
    write_killed(run.folder, 4)
    again = train_here("steps", max_steps=4, logging_steps=1, save_steps=1)
    assert (again.folder / "checkpoint-3").is_dir()
    assert [entry["step"] for entry in logged(again.folder)] == [2, 3, 4]
