"""Checkpoints: completeness, rotation, disk space, the stop file.

A checkpoint is complete once rank 0 has written `complete.json`, with the size and checksum of every file, after all
ranks have written their files. transformers 5.24 has no such marker, and its rotation counts half-written checkpoints.
"""

import logging
import math
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from sfm_dpo.common.distributed import gather_values, is_main_process, on_main_process, rank, world_size
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import hash_file, naming, write_json
from sfm_dpo.run.folder import COMPLETE, EVALUATIONS, read_file
from sfm_dpo.run.lock import is_held

log = logging.getLogger(__name__)

GIB = 2**30
STOP = "STOP"
FOR_GOOD = "for good"  # in STOP: a batch job is not requeued
KEEP = "KEEP"  # a checkpoint with a file of this name is never rotated away
PUSHING = "PUSHING"  # the lease of the process that pushes this model; a checkpoint with it is not rotated away
COLLAPSE_STEPS = 20  # optimizer steps within which a collapse happens; the recorded ones took 5 to 12
MAX_AWAITED = 3  # checkpoints that are kept until eval_command has written their result
# The rank in file names of DeepSpeed, transformers and torch.distributed.checkpoint; rank 0 writes all other files
_WRITER = re.compile(r"(?:pp_rank_|rng_state_|__)(\d+)[_.]")


def checkpoints(run: str | Path) -> list[Path]:
    """The checkpoint-N folders of a run, complete or not, oldest first."""
    folders = [path for path in Path(run).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(folders, key=step_of)


def step_of(checkpoint: Path | None) -> int:
    """N of checkpoint-N; 0 for None and for a folder with another name."""
    number = checkpoint.name.rsplit("-", 1)[-1] if checkpoint else "0"
    return int(number) if number.isdecimal() else 0


def why_incomplete(checkpoint: Path, pattern: str = "*") -> str | None:
    """Why a checkpoint, or what it has of files like `pattern`, is incomplete; None if it is complete."""
    files = read_file(checkpoint / COMPLETE).get("files")
    if not checkpoint.is_dir():
        return "no such folder"
    if files is None:
        return "was not fully written"
    for name, size in files.items():
        path = checkpoint / name
        if not path.match(pattern):
            continue
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"has a damaged {name} ({path.stat().st_size:,} bytes of {size})"
    return None


def why_damaged(checkpoint: Path, pattern: str = "*") -> str | None:
    """Which file of a complete checkpoint does not match its recorded checksum; None if all match. All ranks must call
    it: each reads the files it wrote, and all get the same answer. Raises OSError on all ranks if a file cannot be
    read, which is no damage."""
    checksums = on_main_process(lambda: read_file(checkpoint / COMPLETE).get("xxh3_128", {}))
    damage: Any = None
    for name, checksum in checksums.items():
        if damage or not Path(name).match(pattern) or not _is_mine(name):
            continue
        try:
            if hash_file(checkpoint / name) != checksum:
                damage = f"has a damaged {name} (its checksum differs)"
        except (FileNotFoundError, IsADirectoryError) as error:
            damage = f"has an unreadable {name} ({error.strerror})"
        except OSError as error:
            damage = error
    damage = next(filter(None, gather_values(damage)), None)
    if isinstance(damage, OSError):
        raise damage
    return damage


def _is_mine(name: str) -> bool:
    """Whether this rank wrote the file, or reads it in place of a rank that no longer exists."""
    writer = _WRITER.search(name)
    return int(writer[1] if writer else 0) % world_size() == rank()


def keep_before(run: str | Path, step: float) -> Path | None:
    """Protects the newest complete checkpoint before `step` from rotation, and returns it."""
    older = [c for c in checkpoints(run) if step_of(c) < step and why_incomplete(c) is None]
    if not older:
        return None
    (older[-1] / KEEP).touch()
    return older[-1]


def newest_checkpoint(run: str | Path) -> Path | None:
    return next((c for c in reversed(checkpoints(run)) if why_incomplete(c) is None), None)


def mark_complete(folder: Path, facts: dict[str, Any], paths: Iterable[Path] | None = None) -> None:
    """Writes COMPLETE, for `paths` or all files of a checkpoint. All ranks must call it after all have saved; each
    flushes to disk and hashes the files it wrote."""
    mine = {}
    for path in sorted(folder.rglob("*") if paths is None else paths):
        name = str(path.relative_to(folder))
        if path.is_file() and path.name not in (COMPLETE, KEEP, PUSHING) and _is_mine(name):
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
            mine[name] = (path.stat().st_size, hash_file(path))
    files = sorted(item for part in gather_values(mine) for item in part.items())
    mark = {**facts, "files": {name: size for name, (size, _) in files}}
    mark["xxh3_128"] = {name: checksum for name, (_, checksum) in files}
    if is_main_process():
        write_json(folder / COMPLETE, mark)


def rotate(run: str | Path, limit: int | None, horizon: int = 0, is_start: bool = False) -> None:
    """Deletes incomplete checkpoints (before the newest complete one; all if `is_start`), and the oldest complete ones
    beyond `limit`, except those that have KEEP, are being pushed, or are among the newest MAX_AWAITED that wait for
    eval_command. The newest that is `horizon` steps old, as late as the guard finds a collapse, is also kept, and the
    one after it."""
    newest = step_of(newest_checkpoint(run))
    old = [c for c in checkpoints(run) if is_start or step_of(c) <= newest]
    free = [c for c in old if not (c / KEEP).exists() and not is_held(c / PUSHING)]
    complete = [c for c in free if why_incomplete(c) is None]
    recent = complete[-limit:] if limit else complete
    before = [checkpoint for checkpoint in complete if step_of(checkpoint) <= newest - horizon]
    healthy = [*before[-1:], *complete[len(before) :][:1]]
    awaited = [checkpoint for checkpoint in complete if checkpoint not in recent and is_awaited(checkpoint)]
    for checkpoint in free:
        if checkpoint not in (*recent, *healthy, *awaited[-MAX_AWAITED:]):
            if checkpoint in awaited:
                log.info(f"{checkpoint} is deleted without a result of eval_command: {MAX_AWAITED} newer ones wait")
            # First: an interrupted deletion must not leave it complete
            (checkpoint / COMPLETE).unlink(missing_ok=True)
            try:
                shutil.rmtree(checkpoint)
            except OSError as error:  # on NFS, while another process has one of its files open
                log.warning(f"{checkpoint}: cannot be deleted ({error}); tried again after the next save")


def remove_unlisted(run: Path) -> None:
    """Removes, at a start, what a killed process has left and no COMPLETE lists. In an incomplete checkpoint it would
    be listed after the next save."""
    rotate(run, limit=None, is_start=True)
    for path in (*run.glob(".*.partial"), *run.glob(".tmp??????")):  # the latter: safetensors', as large as the model
        path.unlink(missing_ok=True)


def rotate_run(args: Any) -> None:
    """`rotate` as a run's configuration says."""
    rotate(args.output_dir, args.save_total_limit, horizon=0 if args.guard == "skip" else COLLAPSE_STEPS)


def is_awaited(checkpoint: Path) -> bool:
    """Whether eval_command was started for it and has written no result yet, or an empty file."""
    result = checkpoint.parent / EVALUATIONS / f"step-{step_of(checkpoint)}.json"
    has_result = result.exists() and result.stat().st_size > 0
    return result.with_suffix(".log").exists() and not has_result


def peak_checkpoint_count(args: Any, pairs: int) -> int:
    """The most checkpoints that a run on so many pairs holds at one time: the limit, the one being written, the one
    that the guard keeps, those from before a collapse, and those that wait for eval_command; or all that it writes."""
    if args.save_strategy == "no":
        return 1
    steps = args.count_steps(pairs)
    every = pairs // args.global_batch_size
    if args.save_strategy == "steps":
        every = args.save_steps if args.save_steps >= 1 else math.ceil(args.save_steps * steps)
    written = math.ceil(steps / every)
    if not args.save_total_limit:
        return written
    guarded = 0
    if args.guard != "skip":
        guarded = 3 if every < COLLAPSE_STEPS else 1
    awaited = MAX_AWAITED if args.eval_command else 0
    return min(written, args.save_total_limit + 1 + guarded + awaited)


def check_disk(run: str | Path, size: int, most: int, model: int | None = None) -> None:
    """Raises UserError if the disk has no room for the checkpoints still to be written; `most` exist at one time. A
    run that writes one only if it is stopped gives the size of its `model`, which must fit; for the other it warns."""
    incomplete = [checkpoint.name for checkpoint in checkpoints(run) if why_incomplete(checkpoint)]
    needed = size * max(1, most - len(checkpoints(run)) + len(incomplete))
    what = f"checkpoints will take {format_size(needed)} ({format_size(size)} each)"
    room = shutil.disk_usage(run).free
    free = f"delete {', '.join(incomplete)}, not fully written" if incomplete else "free space"
    remedy = f"{free}, or choose an output_dir on another disk"
    start = f"output_dir {run}: {format_size(room)} are free, but"
    if model is not None:
        if room < size:
            log.warning(f"{start} a checkpoint would take {format_size(size)}, so a stop cannot be saved; {remedy}")
        needed = model
        what = f"the model will take {format_size(model)}"
    if room < needed:
        raise UserError(f"{start} {what}; {remedy}")


def format_size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size // 2**20} MiB"


def stop_requested(run: str | Path) -> bool:
    return (Path(run) / STOP).is_file()


def stop_is_for_good(run: str | Path) -> bool:
    with suppress(FileNotFoundError):  # none, or rank 0 has just removed it
        return (Path(run) / STOP).read_text(errors="replace").strip() == FOR_GOOD
    return False


def clear_stop(run: str | Path) -> None:
    if is_main_process() and stop_requested(run):
        (Path(run) / STOP).unlink()


def clear_old_stop(run: str | Path) -> None:
    """Removes a stop file that is older than this job; a newer one is meant for this run."""
    started = float(os.environ.get("SLURM_JOB_START_TIME") or psutil.Process().create_time())
    if is_main_process() and stop_requested(run) and (Path(run) / STOP).stat().st_mtime < started:
        log.info(f"removed {run}/{STOP}, which was left over from an earlier job")
        clear_stop(run)
