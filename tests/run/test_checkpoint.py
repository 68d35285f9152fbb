"""Checkpoints: marks and damage, rotation, what must agree before a resume, disk space, and whose stop file it is."""

import errno
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from peft import LoraConfig, get_peft_model
from transformers.trainer_utils import SaveStrategy

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import TrainConfig
from sfm_dpo.evaluation.eval_command import EvalCommand
from sfm_dpo.model.sharding import checkpoint_bytes
from sfm_dpo.run.checkpoint import (
    COLLAPSE_STEPS,
    COMPLETE,
    KEEP,
    STOP,
    check_disk,
    checkpoints,
    clear_old_stop,
    mark_complete,
    newest_checkpoint,
    peak_checkpoint_count,
    remove_unlisted,
    rotate,
    step_of,
    stop_requested,
    why_damaged,
    why_incomplete,
)
from sfm_dpo.run.folder import State, write_status
from tests.tiny_models import tiny_model
from tests.toolbox import UNREADABLE


def write_checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    """A checkpoint's folder with the files that transformers and DeepSpeed would write, small."""
    folder = run / f"checkpoint-{step}"
    for name in ("model.safetensors", "trainer_state.json", f"global_step{step}/zero_pp_rank_0.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 100)
    if complete:
        mark_complete(folder, {"step": step, "world_size": 1})
    return folder


def names(run: Path) -> list[str]:
    return [c.name for c in checkpoints(run)]


def test_a_marked_checkpoint_is_complete_and_on_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
    folder = write_checkpoint(tmp_path, 3)
    assert {str(path) for path in folder.rglob("*.*") if path.name != COMPLETE} == {*flushed[:-1]}
    assert why_incomplete(folder) is None
    mark = json.loads((folder / COMPLETE).read_text())
    assert set(mark["files"]) == {"model.safetensors", "trainer_state.json", "global_step3/zero_pp_rank_0.pt"}
    assert (mark["step"], mark["world_size"]) == (3, 1)
    (folder / KEEP).touch()  # put there later, by a person or the guard
    assert why_incomplete(folder) is None
    (folder / "model.safetensors").write_bytes(b"x" * 40)
    assert why_incomplete(folder) == "has a damaged model.safetensors (40 bytes of 100)"
    (folder / "model.safetensors").unlink()
    assert why_incomplete(folder) == "lacks model.safetensors"


@pytest.mark.parametrize("mark", ['{"files": {"model.safetensors": "100"}}', "[]", "[" * 5000])
def test_a_mark_that_no_run_has_written_counts_for_nothing(tmp_path, mark):
    folder = write_checkpoint(tmp_path, 3)
    (folder / COMPLETE).write_text(mark)
    assert why_incomplete(folder) and newest_checkpoint(tmp_path) is None


def test_newest_is_by_step(tmp_path):
    assert newest_checkpoint(tmp_path) is newest_checkpoint(tmp_path / "absent") is None
    write_checkpoint(tmp_path, 3, complete=False)
    assert newest_checkpoint(tmp_path) is None
    for other in ("checkpoint-best", "checkpoint-copy-200", "checkpoint-7.tmp", "checkpoint-²", "figures"):
        (tmp_path / other).mkdir()
    write_checkpoint(tmp_path, 20)
    assert newest_checkpoint(write_checkpoint(tmp_path, 100).parent) == tmp_path / "checkpoint-100"
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]


def test_rotation_counts_neither_incomplete_nor_kept_ones_and_deletes_the_half_written(tmp_path):
    for step in range(8):
        write_checkpoint(tmp_path, step, complete=step not in (0, 1, 7))
    (tmp_path / "checkpoint-0" / KEEP).touch()
    (tmp_path / "checkpoint-2" / KEEP).touch()
    for limit in (None, 4):
        rotate(tmp_path, limit)
        assert names(tmp_path) == [f"checkpoint-{n}" for n in (0, 2, 3, 4, 5, 6, 7)]
    rotate(tmp_path, 2)
    # 7 is later than all complete ones, 0 and 2 are kept; of 3 to 6 the newest two stay
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (0, 2, 5, 6, 7)]


def test_rotation_leaves_the_newest_three_that_wait_for_eval_command(tmp_path, caplog):
    (tmp_path / "evaluations").mkdir()
    for step in range(1, 8):
        write_checkpoint(tmp_path, step)
        (tmp_path / f"evaluations/step-{step}.log").touch()
    (tmp_path / "evaluations/step-4.json").touch()  # still empty
    (tmp_path / "evaluations/step-5.json").write_text('{"acc": 1}')
    (tmp_path / "evaluations/step-6.log").unlink()  # not started
    with caplog.at_level("INFO", "sfm_dpo"):
        rotate(tmp_path, 1)
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (2, 3, 4, 7)]
    assert caplog.text.count(" is deleted without a result of eval_command: 3 newer ones wait") == 1


def test_a_checkpoint_that_cannot_be_deleted_is_deleted_after_a_later_save(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
        rotate(tmp_path, 1)
    assert f"{tmp_path}/checkpoint-1: cannot be deleted ([Errno 39] Directory not empty" in caplog.text
    assert why_incomplete(tmp_path / "checkpoint-1") == "was not fully written"
    rotate(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize(("there", "most", "fits"), [(0, 4, 4), (1, 4, 3), (5, 4, 1), (0, 1, 1)])
def test_disk_must_hold_the_checkpoints_to_come(tmp_path, monkeypatch, there, most, fits):
    for step in range(there):
        write_checkpoint(tmp_path, step)
    free = SimpleNamespace(free=fits * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    check_disk(tmp_path, 2**30, most)
    free.free -= 1
    free_now = "1023 MiB" if fits == 1 else rf"{fits}\.0 GiB"
    with pytest.raises(UserError, match=rf"{free_now} are free, but .* take {fits}\.0 GiB \(1\.0 GiB each\); free"):
        check_disk(tmp_path, 2**30, most)
    (tmp_path / "checkpoint-99").mkdir()
    with pytest.raises(UserError, match="; delete checkpoint-99, not fully written, or choose"):
        check_disk(tmp_path, 2**30, most)


def test_a_run_without_checkpoints_needs_room_for_its_model(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    check_disk(tmp_path, 5 * 2**30, 1, model=2**30)
    assert "1.0 GiB are free, but a checkpoint would take 5.0 GiB, so a stop cannot be saved; free" in caplog.text
    with pytest.raises(UserError, match=r"1\.0 GiB are free, but the model will take 2\.0 GiB; free space, or choose"):
        check_disk(tmp_path, 5 * 2**30, 1, model=2**31)
    caplog.clear()
    check_disk(tmp_path, 2**30, 1, model=2**29)
    assert not caplog.text


def test_size_of_a_checkpoint_is_that_of_weights_and_optimizer():
    model = tiny_model("llama", num_hidden_layers=1)
    count = sum(p.numel() for p in model.parameters())
    assert checkpoint_bytes(model, 0, False, 8.0) == count * (4 + 8)
    assert checkpoint_bytes(model, 0, True, 8.0) == checkpoint_bytes(model, 3, False, 8.0) == count * (4 + 12)
    assert checkpoint_bytes(model, 3, False, 4.0) == count * (4 + 8)
    assert checkpoint_bytes(model.bfloat16(), 2, False, 8.0) == count * (2 + 2 + 12)
    frozen = model.lm_head.weight.requires_grad_(False)
    assert checkpoint_bytes(model, 0, False, 8.0) == 2 * count + 8 * (count - frozen.numel())
    adapter = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))  # only what is trained is saved
    assert checkpoint_bytes(adapter, 0, False, 8.0) == adapter.num_parameters(only_trainable=True) * (4 + 8)


def test_checkpoints_at_one_time():
    args = TrainConfig(output_dir="x", save_strategy="steps", save_steps=20, save_total_limit=2, use_cpu=True)
    pairs = 1000 * args.global_batch_size
    assert peak_checkpoint_count(args, pairs) == 2 + 1 + 1
    args.save_steps = 19
    assert peak_checkpoint_count(args, pairs) == 2 + 1 + 3
    args.save_steps = 0.25  # of the steps
    assert peak_checkpoint_count(args, pairs) == 2 + 1 + 1
    args.save_strategy = SaveStrategy.EPOCH
    args.num_train_epochs = 9
    assert peak_checkpoint_count(args, 10 * args.global_batch_size) == 2 + 1 + 3
    args.save_strategy = SaveStrategy.STEPS
    args.num_train_epochs = 1
    args.save_steps = 19
    args.guard = "skip"
    assert peak_checkpoint_count(args, pairs) == 2 + 1
    args.eval_command = "true {checkpoint} {out}"
    assert peak_checkpoint_count(args, pairs) == 2 + 1 + 3
    args.save_total_limit = None  # all are kept
    assert peak_checkpoint_count(args, pairs) == math.ceil(1000 / 19)
    args.save_strategy = SaveStrategy.EPOCH
    args.num_train_epochs = 1.5
    assert peak_checkpoint_count(args, pairs) == 2


def test_the_end_of_a_run_with_eval_command_leaves_the_guards_checkpoint(tmp_path):
    (tmp_path / "evaluations").mkdir()
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
        (tmp_path / f"evaluations/step-{step}.log").touch()
        (tmp_path / f"evaluations/step-{step}.json").write_text('{"acc": 1}')
    write_status(tmp_path, State.DONE, 0, step=40)
    args = TrainConfig(output_dir=str(tmp_path), save_total_limit=2, eval_command="true {checkpoint}", use_cpu=True)
    assert EvalCommand(args).wait()
    assert names(tmp_path) == [f"checkpoint-{step}" for step in (20, 30, 40)]


@pytest.mark.parametrize("every", [1, 2, 5, 7, 15, 25])
def test_a_checkpoint_from_before_a_collapse_survives_rotation(tmp_path, every):
    """At whatever step a collapse is detected, there is a checkpoint from before it began."""
    write_checkpoint(tmp_path, 1)
    (tmp_path / "checkpoint-1" / KEEP).touch()  # a user's
    for step in range(every + 1, 121, every):
        write_checkpoint(tmp_path, step)
        rotate(tmp_path, 2, COLLAPSE_STEPS)
        on_disk = [step_of(checkpoint) for checkpoint in checkpoints(tmp_path)]
        assert on_disk[0] == 1 and step in on_disk and len(on_disk) <= 1 + 4
        if step > COLLAPSE_STEPS + every:
            old = [number for number in on_disk[1:] if number <= step - COLLAPSE_STEPS]
            assert max(old) >= step - 2 * COLLAPSE_STEPS - every


@pytest.mark.parametrize(
    ("written", "job_start", "rank", "is_removed"),
    [
        (5, None, 0, False),  # made since this process began: meant for it
        (-5, None, 0, True),
        (-5, None, 1, False),  # rank 0 removes it
        (-5, -60, 0, False),  # by the batch script, between its start and that of Python
        (5, 60, 0, True),
    ],
)
def test_a_stop_file_from_before_the_job_is_removed(tmp_path, monkeypatch, written, job_start, rank, is_removed):
    """`written` and `job_start`: seconds after the start of this process."""
    stop = tmp_path / STOP
    start = psutil.Process().create_time()
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    if job_start:
        monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(start) + job_start))
    monkeypatch.setenv("RANK", str(rank))
    clear_old_stop(tmp_path)  # there is none
    stop.touch()
    os.utime(stop, (start + written, start + written))
    clear_old_stop(tmp_path)
    assert stop_requested(tmp_path) is not is_removed


def test_what_is_no_file_is_damage_and_an_error_of_reading_is_none(tmp_path):
    folder = write_checkpoint(tmp_path, 3)
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    assert why_damaged(folder) == "has an unreadable model.safetensors (Is a directory)"
    assert why_damaged(folder, "*.json") is None
    weights.rmdir()
    weights.symlink_to(UNREADABLE)
    with pytest.raises(OSError, match=rf"Input/output error: '{weights}'"):
        why_damaged(folder)


def test_a_start_removes_what_no_list_names(tmp_path):
    for step in (2, 4, 6, 8):
        write_checkpoint(tmp_path, step, complete=step < 5)
    (tmp_path / "checkpoint-8" / KEEP).touch()
    (tmp_path / "checkpoint-4" / "notes.txt").touch()  # a person's
    for name in (".tmpAb12Cd", ".status.json.n1.7.partial", ".lock", "model.safetensors"):
        (tmp_path / name).touch()
    remove_unlisted(tmp_path)
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (2, 4, 8)]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {".lock", "model.safetensors"}
    assert (tmp_path / "checkpoint-4" / "notes.txt").exists()
