"""Checkpoints: which are complete, what a resumed run must agree with, rotation, disk space, the stop file.

A checkpoint is complete once rank 0 has written `complete.json`, with the size and checksum of every file, after all
ranks have written theirs. transformers 5.23 has no such mark, and its rotation would count half-written checkpoints.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import psutil
import xxhash

from sfm_dpo.common.distributed import broadcast, gather, is_main_process, rank, world_size
from sfm_dpo.common.errors import ResumeRefused, UserError
from sfm_dpo.common.files import write_json
from sfm_dpo.run.folder import read_mapping

log = logging.getLogger(__name__)

GIB = 2**30
COMPLETE = "complete.json"
STOP = "STOP"
KEEP = "KEEP"  # a checkpoint that holds a file of this name is never rotated away
PUSHING = "PUSHING"  # nor is one in which this file names a live process: it is on its way to the Hub
# The rank in the file names of DeepSpeed, transformers and torch.distributed.checkpoint; all others are rank 0's
_WRITER = re.compile(r"(?:pp_rank_|rng_state_|__)(\d+)[_.]")


def checkpoints(run: str | Path) -> list[Path]:
    """checkpoint-N of a run, complete or not, oldest first."""
    folders = [folder for folder in Path(run).glob("checkpoint-*") if folder.name.rsplit("-", 1)[1].isdecimal()]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path | None) -> int:
    """The step that checkpoint-N resumes from; 0 for none, or for a folder of another name."""
    number = checkpoint.name.rsplit("-", 1)[-1] if checkpoint else "0"
    return int(number) if number.isdecimal() else 0


def why_incomplete(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is complete."""
    try:
        files = dict(_read_facts(checkpoint)["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "was not written to the end"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"has a damaged {name} ({path.stat().st_size:,} bytes of {size})"
    return None


def why_damaged(checkpoint: Path, pattern: str = "*", alone: bool = False) -> str | None:
    """Which file of a complete checkpoint has another checksum than in its mark; None if all agree. All ranks must
    call it, each reads what it wrote, and all get the same answer; or one, `alone`, reads all."""
    damage = None
    for name, checksum in _read_facts(checkpoint).get("xxh3_128", {}).items():
        if damage or not Path(name).match(pattern) or not (alone or _is_mine(name)):
            continue
        try:
            if _hash_file(checkpoint / name) != checksum:
                damage = f"has a damaged {name} (its checksum is another)"
        except OSError as error:
            damage = f"has a {name} that cannot be read ({error.strerror})"
    return damage if alone else next(filter(None, gather(damage)), None)


def _is_mine(name: str) -> bool:
    """Whether this rank wrote a checkpoint's file, or reads it for one that did where there were more ranks."""
    writer = _WRITER.search(name)
    return int(writer[1] if writer else 0) % world_size() == rank()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def keep_before(run: str | Path, step: float, author: str) -> Path | None:
    """Moves `author`'s KEEP to the newest complete checkpoint below `step`, which it returns; leaves others'."""
    older = [c for c in checkpoints(run) if step_of(c) < step and why_incomplete(c) is None]
    for mark in [checkpoint / KEEP for checkpoint in older[:-1]]:
        if mark.exists() and mark.read_text() == author:
            mark.unlink()
    if older and not (older[-1] / KEEP).exists():
        (older[-1] / KEEP).write_text(author)
    return older[-1] if older else None


def newest_checkpoint(run: str | Path) -> Path | None:
    return next((c for c in reversed(checkpoints(run)) if why_incomplete(c) is None), None)


def find_start(args: Any) -> Path | None:
    """The checkpoint a run resumes from: the one asked for, or the newest complete one. All ranks must call it, and
    get the same. A damaged one loses its mark, so that it never counts as complete again."""
    clear_old_stop(args.output_dir)
    if asked := args.resume_from_checkpoint:
        if reason := _why_unusable(Path(asked), args.verify_checkpoints):
            raise UserError(f"resume_from_checkpoint {asked}: {reason}; choose another, or remove the field")
        return Path(asked)
    for checkpoint in broadcast(checkpoints(args.output_dir)[::-1]):
        reason = _why_unusable(checkpoint, args.verify_checkpoints)
        if reason is None:
            return checkpoint
        log.info(f"{checkpoint} {reason}: skipped")
        if is_main_process():
            (checkpoint / COMPLETE).unlink(missing_ok=True)
    return None


def _why_unusable(checkpoint: Path, verify: bool, pattern: str = "*") -> str | None:
    """What keeps a run from this checkpoint, the same on all ranks."""
    reason = broadcast(why_incomplete(checkpoint))
    if reason is None and verify:
        reason = why_damaged(checkpoint, pattern)
        if reason is None:
            log.info(f"{checkpoint}: checksums verified")
    return reason


def mark_complete(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Writes the mark. All ranks must call it, once all have written: each hashes the files that it wrote."""
    mine = {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.is_file() and path.name not in (COMPLETE, KEEP, PUSHING) and _is_mine(name):
            mine[name] = (path.stat().st_size, _hash_file(path))
    files = sorted(item for part in gather(mine) for item in part.items())
    mark = {**facts, "files": {name: size for name, (size, _) in files}}
    mark["xxh3_128"] = {name: checksum for name, (_, checksum) in files}
    if is_main_process():
        write_json(checkpoint / COMPLETE, mark)


def read_best(checkpoint: Path) -> Path | None:
    """The best checkpoint when `checkpoint` was written, by metric_for_best_model; None where there was none."""
    step = read_mapping(checkpoint / "trainer_state.json").get("best_global_step")
    return checkpoint.with_name(f"checkpoint-{step}") if step else None


def check_best(best: Path | None, args: Any) -> None:
    """Raises UserError if there is no best checkpoint, or it is not what was written. All ranks must call it."""
    reason: str | None = "does not exist: the metric was never finite"
    if best:
        reason = _why_unusable(best, args.verify_checkpoints, "*.safetensors")
    if reason:
        raise UserError(
            f"load_best_model_at_end: the best checkpoint {best or ''} {reason}; to save the last weights: "
            f"--load_best_model_at_end false --metric_for_best_model {args.metric_for_best_model}"
        )


def copy_best(best: str | None, args: Any) -> None:
    """Puts the weights of the best checkpoint in the place of the last ones in output_dir, once they are checked."""
    check_best(Path(best) if best else None, args)
    if best and is_main_process():
        for file in Path(best).glob("*.safetensors"):
            shutil.copyfile(file, Path(args.output_dir) / file.name)


def rotate(run: str | Path, limit: int | None) -> None:
    """Deletes the oldest complete checkpoints beyond `limit`, but none that is kept, being pushed, or the best one
    of a newer checkpoint, from which a run may resume."""
    if limit is None:
        return
    complete = [c for c in checkpoints(run) if why_incomplete(c) is None and not (c / KEEP).exists()]
    complete = [c for c in complete if not is_being_pushed(c)]
    best = [read_best(checkpoint) for checkpoint in complete[-limit:]]
    for checkpoint in complete[:-limit]:
        if checkpoint not in best:
            (checkpoint / COMPLETE).unlink()  # first: a kill in the middle must not leave half of a complete one
            shutil.rmtree(checkpoint)


def is_being_pushed(checkpoint: Path) -> bool:
    """Whether a process that lives is pushing it to the Hub."""
    try:
        return psutil.pid_exists(int((checkpoint / PUSHING).read_text()))
    except (OSError, ValueError):
        return False


_DIFFERENCES = {  # by fact of the mark, in which a resumed run must agree
    "world_size": "was written by {was} process(es), now there are {now}",
    "train_tokens": "the data have changed since it was written",
    "order_version": "was written by a version of this project that put the pairs in another order ({was}, now {now})",
    "launch": "was written with launch {was}, now it is {now}, which cannot read its optimizer",
}


def check_resume(checkpoint: Path, facts: dict[str, Any], ignore: bool) -> None:
    """Raises UserError if the run that wrote `checkpoint` differs from this one in a fact; `ignore`
    (ignore_resume_mismatch) does not help where its optimizer cannot be read."""
    before = _read_facts(checkpoint)
    is_zero = str(before.get("launch")).startswith("ZeRO")  # DeepSpeed cannot divide it among other processes
    for name, now in facts.items():
        was = before.get(name)
        may_ignore = name != "launch" and not (name == "world_size" and is_zero)
        if was == now or (ignore and may_ignore):
            continue
        difference = _DIFFERENCES[name].format(was=was, now=now)
        override = ", or say ignore_resume_mismatch: true" if may_ignore else ""
        raise ResumeRefused(f"{checkpoint}: {difference}; resume as before, or start in another output_dir{override}")


def _read_facts(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / COMPLETE).read_text())


def peak_checkpoint_count(args: Any, collapse_steps: int) -> int:
    """Checkpoints that a run has at one time: the limit, the one being written, the best, and those that the guard
    keeps: two where saves are closer than `collapse_steps`."""
    if args.save_strategy == "no":
        return 1
    protected = 0 if args.guard == "skip" else 1 + (args.save_strategy == "steps" and args.save_steps < collapse_steps)
    return (args.save_total_limit or 1) + 1 + protected + bool(args.metric_for_best_model)


def check_disk(run: str | Path, size: int, most: int) -> None:
    """Raises UserError if the disk cannot take the checkpoints still to come, `most` of them at one time in all."""
    complete = sum(1 for c in checkpoints(run) if why_incomplete(c) is None)
    needed = size * max(1, most - complete)
    free = shutil.disk_usage(run).free
    if free < needed:
        raise UserError(
            f"output_dir {run}: {free / GIB:.1f} GiB are free, checkpoints will take {needed / GIB:.1f} GiB "
            f"({size / GIB:.1f} GiB each); free space, or choose an output_dir on another disk"
        )


def stop_requested(run: str | Path) -> bool:
    return (Path(run) / STOP).is_file()


def clear_stop(run: str | Path) -> None:
    if is_main_process():
        (Path(run) / STOP).unlink(missing_ok=True)


def clear_old_stop(run: str | Path) -> None:
    """Removes a stop file from before this job. A newer one is meant for this run."""
    started = float(os.environ.get("SLURM_JOB_START_TIME") or psutil.Process().create_time())
    if is_main_process() and stop_requested(run) and (Path(run) / STOP).stat().st_mtime < started:
        log.info(f"{run}/{STOP} was left over from earlier: removed")
        clear_stop(run)
