"""Where were we? Marks and damage, rotation, what must agree to go on, disk space, and whose stop file it is."""

import json
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import TrainConfig
from sfm_dpo.model.sharding import checkpoint_bytes
from sfm_dpo.run.checkpoint import (
    COMPLETE,
    KEEP,
    STOP,
    check_disk,
    check_resume,
    checkpoints,
    clear_old_stop,
    find_start,
    mark_complete,
    most_at_once,
    newest_checkpoint,
    rotate,
    step_of,
    stop_requested,
    why_incomplete,
)
from sfm_dpo.train.stop import StopCallback
from tests.tiny_models import tiny_model

FACTS = {"step": 1, "world_size": 2, "train_tokens": "abc"}


def write_checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    """A checkpoint's folder with the files that transformers and DeepSpeed would write, small."""
    folder = run / f"checkpoint-{step}"
    for name in ("model.safetensors", "trainer_state.json", f"global_step{step}/zero_pp_rank_0.pt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 100)
    if complete:
        mark_complete(folder, FACTS | {"step": step})
    return folder


def names(run: Path) -> list[str]:
    return [c.name for c in checkpoints(run)]


def test_checkpoints_are_sorted_by_step_and_other_folders_are_none(tmp_path):
    for step in (100, 20, 3):
        write_checkpoint(tmp_path, step)
    for other in ("checkpoint-best", "checkpoint-7.tmp", "figures"):
        (tmp_path / other).mkdir()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]


def test_a_marked_checkpoint_is_complete(tmp_path):
    folder = write_checkpoint(tmp_path, 3)
    assert why_incomplete(folder) is None
    mark = json.loads((folder / COMPLETE).read_text())
    assert set(mark["files"]) == {"model.safetensors", "trainer_state.json", "global_step3/zero_pp_rank_0.pt"}
    assert (mark["step"], mark["world_size"]) == (3, 2)
    (folder / KEEP).touch()  # put there later, by a person or the guard
    assert why_incomplete(folder) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: (c / COMPLETE).unlink(), "was not written to the end"),
        (lambda c: (c / COMPLETE).write_text('{"files": {"mo'), "was not written to the end"),
        (lambda c: (c / COMPLETE).write_text("[]"), "was not written to the end"),
        (lambda c: (c / COMPLETE).write_text('{"files": ["model.safetensors"]}'), "was not written to the end"),
        (lambda c: (c / "model.safetensors").unlink(), "lacks model.safetensors"),
        (lambda c: shutil.rmtree(c / "global_step3"), "lacks global_step3/zero_pp_rank_0.pt"),
        (
            lambda c: (c / "model.safetensors").write_bytes(b"x" * 40),
            r"has a damaged model.safetensors \(40 bytes of 100\)",
        ),
    ],
    ids=["no mark", "half a mark", "no mapping", "no sizes", "file gone", "folder gone", "truncated"],
)
def test_damage_is_named_and_skipped_and_nothing_is_deleted(tmp_path, damage, reason):
    good = write_checkpoint(tmp_path, 2)
    bad = write_checkpoint(tmp_path, 3)
    damage(bad)
    left = sorted(p for p in bad.rglob("*"))
    newest, skipped = newest_checkpoint(tmp_path)
    assert newest == good
    assert len(skipped) == 1
    assert re.fullmatch(rf"{re.escape(str(bad))} {reason}: skipped", skipped[0]), skipped
    assert sorted(p for p in bad.rglob("*")) == left


def test_newest_of_none(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, [])
    assert newest_checkpoint(tmp_path / "absent") == (None, [])
    write_checkpoint(tmp_path, 1, complete=False)
    newest, skipped = newest_checkpoint(tmp_path)
    assert newest is None and len(skipped) == 1


def test_older_damage_is_not_spoken_of(tmp_path):
    write_checkpoint(tmp_path, 1, complete=False)
    assert newest_checkpoint(write_checkpoint(tmp_path, 2).parent) == (tmp_path / "checkpoint-2", [])


def test_rotation_keeps_the_newest_complete_ones(tmp_path):
    for step in range(1, 6):
        write_checkpoint(tmp_path, step)
    rotate(tmp_path, None)
    assert len(names(tmp_path)) == 5
    rotate(tmp_path, 5)
    assert len(names(tmp_path)) == 5
    rotate(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]


def test_rotation_neither_counts_nor_deletes_incomplete_and_kept_ones(tmp_path):
    for step in range(1, 7):
        write_checkpoint(tmp_path, step, complete=step not in (1, 6))
    (tmp_path / "checkpoint-2" / KEEP).touch()
    rotate(tmp_path, 2)
    # 1 and 6 are incomplete, 2 is kept; of 3, 4, 5 the newest two stay
    assert names(tmp_path) == [f"checkpoint-{n}" for n in (1, 2, 4, 5, 6)]


def test_a_kill_in_the_middle_of_a_rotation_leaves_no_complete_looking_half(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)

    def killed(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        rotate(tmp_path, 2)
    assert why_incomplete(tmp_path / "checkpoint-1") == "was not written to the end"
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-3"


def test_a_run_goes_on_only_with_what_wrote_the_checkpoint(tmp_path):
    folder = write_checkpoint(tmp_path, 3)
    now = {"world_size": 2, "train_tokens": "abc"}
    check_resume(folder, now, ignore=False)
    for name, value, before in (("world_size", 4, "2"), ("train_tokens", "xyz", "abc")):
        with pytest.raises(UserError) as caught:
            check_resume(folder, now | {name: value}, ignore=False)
        message = str(caught.value)
        assert f"{folder}: was written with {name} {before}, now it is {value}" in message
        assert "ignore_resume_mismatch: true" in message
        check_resume(folder, now | {name: value}, ignore=True)


# ---- disk


def disk_with(monkeypatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


@pytest.mark.parametrize(("there", "most", "fits"), [(0, 4, 4), (1, 4, 3), (3, 4, 1), (5, 4, 1), (0, 1, 1)])
def test_disk_must_hold_the_checkpoints_to_come(tmp_path, monkeypatch, there, most, fits):
    for step in range(there):
        write_checkpoint(tmp_path, step)
    size = 2**30
    disk_with(monkeypatch, fits * size)
    check_disk(tmp_path, size, most)
    disk_with(monkeypatch, fits * size - 1)
    with pytest.raises(UserError, match=rf"checkpoints will take {fits}\.0 GiB \(1\.0 GiB each\); free space"):
        check_disk(tmp_path, size, most)


def test_size_of_a_checkpoint_is_that_of_weights_and_optimizer():
    model = tiny_model("llama", num_hidden_layers=1)
    count = sum(p.numel() for p in model.parameters())
    assert checkpoint_bytes(model) == count * (4 + 8)
    assert checkpoint_bytes(model, is_fsdp=True) == checkpoint_bytes(model, zero_stage=3) == count * (4 + 12)
    assert checkpoint_bytes(model.bfloat16(), zero_stage=2) == count * (2 + 2 + 12)
    for parameter in model.parameters():
        parameter.requires_grad = False
    adapter = model.lm_head.weight.requires_grad_()  # only what is trained is saved, and moments are of that alone
    assert checkpoint_bytes(model) == adapter.numel() * (4 + 8)


def test_checkpoints_at_one_time():
    args = TrainConfig(output_dir="x", save_strategy="steps", save_steps=20, save_total_limit=2, use_cpu=True)
    assert most_at_once(args, collapse_steps=20) == 2 + 1 + 1
    args.save_steps = 19
    assert most_at_once(args, collapse_steps=20) == 2 + 1 + 2
    args.guard = "skip"
    assert most_at_once(args, collapse_steps=20) == 2 + 1


# ---- the stop file


def test_a_stop_file_from_before_the_job_is_removed(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_START_TIME", raising=False)
    stop = tmp_path / STOP
    assert clear_old_stop(tmp_path) is False
    stop.touch()
    # made since this process began: meant for it
    assert clear_old_stop(tmp_path) is False and stop_requested(tmp_path)
    before = psutil.Process().create_time() - 5
    os.utime(stop, (before, before))
    assert clear_old_stop(tmp_path) is True
    assert not stop.exists()


def test_under_slurm_the_job_is_what_counts_not_the_process(tmp_path, monkeypatch):
    """The batch script may write STOP between the job's start and that of Python: it must not be thrown away."""
    stop = tmp_path / STOP
    stop.touch()
    early = psutil.Process().create_time() - 5
    os.utime(stop, (early, early))
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(early) - 60))
    assert clear_old_stop(tmp_path) is False and stop.exists()
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(time.time()) + 60))
    assert clear_old_stop(tmp_path) is True and not stop.exists()


def test_only_rank_0_removes_it(tmp_path, monkeypatch):
    stop = tmp_path / STOP
    stop.touch()
    os.utime(stop, (1, 1))
    monkeypatch.setenv("RANK", "1")
    assert clear_old_stop(tmp_path) is True  # all ranks see the same
    assert stop.exists()


# ---- lead time


def lead(monkeypatch, seconds: float | None, took: dict[str, float]) -> StopCallback:
    """A callback that has seen a step, an evaluation and a save of these seconds, by a clock that we turn."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("sfm_dpo.train.stop.broadcast", lambda value: value)
    if seconds is None:
        monkeypatch.delenv("STOP_LEAD_SECONDS", raising=False)
    else:
        monkeypatch.setenv("STOP_LEAD_SECONDS", str(seconds))
    callback = StopCallback()
    args, state = SimpleNamespace(output_dir="/absent"), SimpleNamespace(global_step=1, max_steps=9)
    for _ in range(3):
        callback.on_step_begin()
        for what, event in (("step", "on_step_end"), ("evaluation", "on_evaluate"), ("save", "on_save")):
            clock[0] += took.get(what, 0)
            getattr(callback, event)(args, state, SimpleNamespace(should_log=False, should_save=False))
    return callback


def test_a_lead_shorter_than_step_evaluation_and_save_is_warned_about_once(monkeypatch, capsys):
    callback = lead(monkeypatch, 600, {"step": 40, "evaluation": 60, "save": 501})
    assert callback.seconds == {"step": 40, "evaluation": 60, "save": 501}
    warnings = capsys.readouterr().out.splitlines()
    assert len(warnings) == 1
    assert "600 s before the time limit" in warnings[0]
    assert "takes 601 s (step 40 s + evaluation 60 s + save 501 s)" in warnings[0]
    assert "STOP_LEAD_SECONDS=960 " in warnings[0]


@pytest.mark.parametrize("seconds", [600, None], ids=["long enough", "no batch script"])
def test_no_warning_where_the_lead_is_long_enough_or_nobody_has_one(monkeypatch, capsys, seconds):
    lead(monkeypatch, seconds, {"step": 40, "evaluation": 60, "save": 500 if seconds else 5000})
    assert capsys.readouterr().out == ""


def test_a_checkpoint_asked_for_must_be_complete(tmp_path, capsys):
    bad = write_checkpoint(tmp_path, 3, complete=False)
    with pytest.raises(UserError, match=r"resume_from_checkpoint .*checkpoint-3: was not written to the end; choose"):
        find_start(SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=str(bad)))
    good = write_checkpoint(tmp_path, 2)
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None)
    assert find_start(args) == good
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{bad} was not written to the end: skipped"
    assert lines[1:] == [f"1 incomplete checkpoint(s) take 0.0 GiB; to delete them: rm -r {bad}"]
    assert (step_of(good), step_of(None), step_of(tmp_path / "base")) == (2, 0, 0)
