"""Checkpoints: which are complete, what a resumed run must agree with, rotation, disk space, the stop file.

A checkpoint is complete when its `complete.json` says so: rank 0 writes it, with the size and checksum of every file,
when all ranks have written theirs. transformers 5.23 has no such mark, and its own rotation would count half-written
checkpoints and delete a complete one for their sake; so rotation is done here, after the mark.
"""

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from sfm_dpo.common.distributed import broadcast, gather, is_main_process, rank, world_size
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import format_size, write_json
from sfm_dpo.run.folder import read_mapping

log = logging.getLogger(__name__)

COMPLETE, STOP = "complete.json", "STOP"
ROW_KEYS = "row_keys.npy"  # beside the checkpoints: keys of the pairs (tokenization.row_keys)
KEEP = "KEEP"  # a checkpoint that holds a file of this name is never rotated away
PUSHING = "PUSHING"  # nor is one in which this file names a process that lives: it is on its way to the Hub
# The rank in the file names of DeepSpeed, transformers and torch.distributed.checkpoint; all others are rank 0's
_WRITER = re.compile(r"(?:pp_rank_|rng_state_|__)(\d+)[_.]")


def checkpoints(run: str | Path) -> list[Path]:
    """checkpoint-N of a run, complete or not, oldest first."""
    folders = [p for p in Path(run).glob("checkpoint-*") if p.name.rsplit("-", 1)[1].isdigit()]
    return sorted(folders, key=lambda p: int(p.name.rsplit("-", 1)[1]))


def step_of(checkpoint: Path | None) -> int:
    """The step that checkpoint-N goes on from; 0 for none, or for a folder of another name."""
    number = checkpoint.name.rsplit("-", 1)[-1] if checkpoint else "0"
    return int(number) if number.isdigit() else 0


def why_incomplete(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is complete."""
    try:
        mark = json.loads((checkpoint / COMPLETE).read_text())
        files = mark["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "was not written to the end"
    if damage := mark.get("damage"):
        return damage
    for name, size in files:
        path = checkpoint / name
        if not path.is_file():
            return f"lacks {name}"
        if path.stat().st_size != size:
            return f"has a damaged {name} ({path.stat().st_size:,} bytes of {size:,})"
    return None


def why_damaged(checkpoint: Path, pattern: str = "*", alone: bool = False) -> str | None:
    """Which file of a complete checkpoint has another checksum than in its mark; None if all agree, or it has none.

    All ranks must call it, each reads what it wrote, and all get the same answer; or one, `alone`, reads all.
    """
    checksums = json.loads((checkpoint / COMPLETE).read_text()).get("xxh3_128", {})
    damage, read, begin = None, 0, time.monotonic()
    for name in checksums:
        if damage or not (alone or _is_mine(name)) or not Path(name).match(pattern):
            continue
        try:
            size, checksum = _hash_file(checkpoint / name)
            read += size
            damage = f"has a damaged {name} (its checksum is another)" if checksum != checksums[name] else None
        except OSError as error:
            damage = f"has a {name} that cannot be read ({error.strerror})"
    if alone:
        return damage
    damage = next(filter(None, gather(damage)), None)
    if not checksums:
        log.info(f"{checkpoint}: an earlier version wrote it, without checksums; it is not verified")
    elif not damage:
        _log_rate(checkpoint, "verified", read, begin)
    return damage


def _is_mine(name: str) -> bool:
    """Whether this rank wrote a checkpoint's file, or stands for one that did where there were more ranks."""
    writer = _WRITER.search(name)
    return int(writer[1] if writer else 0) % world_size() == rank()


def _hash_file(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _log_rate(checkpoint: Path, done: str, size: int, begin: float) -> None:
    """Of rank 0, which has the most to read."""
    log.info(f"{checkpoint}: checksums {done} in {time.monotonic() - begin:.1f} s ({size / 1e9:.2f} GB of rank 0)")


def keep_before(run: str | Path, step: float, author: str) -> Path | None:
    """Writes KEEP into the newest complete checkpoint below `step`, and takes `author`'s KEEP from all older ones.

    Returns that checkpoint, or None where there is none. A KEEP that says another author is left alone.
    """
    older = [c for c in checkpoints(run) if step_of(c) < step and why_incomplete(c) is None]
    for checkpoint in older:
        mark = checkpoint / KEEP
        if checkpoint == older[-1]:
            if not mark.exists():
                mark.write_text(author)
        elif mark.exists() and mark.read_text() == author:
            mark.unlink()
    return older[-1] if older else None


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest complete checkpoint."""
    return next((c for c in reversed(checkpoints(run)) if why_incomplete(c) is None), None)


def find_start(args: Any) -> Path | None:
    """The checkpoint a run goes on from: the one asked for, or the newest whole one. Says what it skips.

    All ranks must call it, and get the same. A damaged one is marked, so that it never counts as complete again.
    """
    run, asked = args.output_dir, args.resume_from_checkpoint
    if clear_old_stop(run):
        log.info(f"{run}/{STOP} was left over from earlier: removed")
    newest = None
    for checkpoint in broadcast([Path(asked)] if asked else checkpoints(run)[::-1]):
        reason = broadcast(why_incomplete(checkpoint))
        if reason is None and args.verify_checkpoints:
            reason = why_damaged(checkpoint)
            if reason and not asked and is_main_process():
                mark = json.loads((checkpoint / COMPLETE).read_text()) | {"damage": reason}
                write_json(checkpoint / COMPLETE, mark)
        if reason is None:
            newest = checkpoint
            break
        if asked:
            raise UserError(f"resume_from_checkpoint {checkpoint}: {reason}; choose another, or remove the field")
        log.info(f"{checkpoint} {reason}: skipped")
    if not asked and (left := [c for c in checkpoints(run) if why_incomplete(c)]):  # also the older ones
        size = sum(file.stat().st_size for c in left for file in c.rglob("*") if file.is_file())
        delete = shlex.join(["rm", "-r", *map(str, left)])
        log.info(f"{len(left)} incomplete checkpoint(s) take {format_size(size)}; to delete them: {delete}")
    return newest


def mark_complete(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Writes the mark; `facts` is what a resumed run must agree with.

    All ranks must call it, once all have written: each hashes the files that it wrote.
    """
    begin, mine = time.monotonic(), {}
    for path in sorted(checkpoint.rglob("*")):
        name = str(path.relative_to(checkpoint))
        if path.is_file() and path.name not in (COMPLETE, KEEP, PUSHING) and _is_mine(name):
            mine[name] = _hash_file(path)
    files = sorted(item for part in gather(mine) for item in part.items())
    _log_rate(checkpoint, "written", sum(size for size, _ in mine.values()), begin)
    mark = {**facts, "files": {name: size for name, (size, _) in files}}
    mark["xxh3_128"] = {name: checksum for name, (_, checksum) in files}
    if is_main_process():
        write_json(checkpoint / COMPLETE, mark)


def read_best(checkpoint: Path) -> Path | None:
    """The best checkpoint when `checkpoint` was written, by metric_for_best_model; None where there was none."""
    step = read_mapping(checkpoint / "trainer_state.json").get("best_global_step")
    return checkpoint.with_name(f"checkpoint-{step}") if step else None


def check_best(best: str | Path | None, args: Any) -> None:
    """Raises UserError if there is no best checkpoint, or it is not what was written. All ranks must call it."""
    reason = broadcast(why_incomplete(Path(best)) if best else "does not exist: the metric was never finite")
    if reason is None and best and args.verify_checkpoints:
        reason = why_damaged(Path(best), "*.safetensors")
    if reason:
        raise UserError(
            f"load_best_model_at_end: the best checkpoint {best or ''} {reason}; to save the last weights: "
            f"--load_best_model_at_end false --metric_for_best_model {args.metric_for_best_model}"
        )


def copy_best(best: str | None, args: Any) -> None:
    """Puts the weights of the best checkpoint in the place of the last ones in output_dir, once they are checked."""
    check_best(best, args)
    for file in Path(best or "").glob("*.safetensors") if is_main_process() else ():
        shutil.copyfile(file, Path(args.output_dir) / file.name)


def rotate(run: str | Path, limit: int | None) -> None:
    """Deletes the oldest complete checkpoints beyond `limit`, but none that is kept, being pushed, or the best one
    of a newer checkpoint, from which a run may go on."""
    complete = [c for c in checkpoints(run) if why_incomplete(c) is None and not (c / KEEP).exists()]
    complete = [c for c in complete if not is_being_pushed(c)]
    old = complete[: -limit or None] if limit is not None and len(complete) > limit else []
    best = [read_best(checkpoint) for checkpoint in complete[len(old) :]]
    for checkpoint in (checkpoint for checkpoint in old if checkpoint not in best):
        (checkpoint / COMPLETE).unlink()  # first: a kill in the middle must not leave half of a complete one
        shutil.rmtree(checkpoint)


def is_being_pushed(checkpoint: Path) -> bool:
    """Whether a process that lives is pushing it to the Hub."""
    try:
        return psutil.pid_exists(int((checkpoint / PUSHING).read_text()))
    except (OSError, ValueError):
        return False


def check_world_size(args: Any, world_size: int, checkpoint: Path | None = None) -> None:
    """Raises UserError if a run cannot go on from its checkpoint with so many processes, or is not said to.

    Args:
        checkpoint: by default the one that the run would go on from.
    """
    if checkpoint is None:
        asked = args.resume_from_checkpoint
        checkpoint = Path(asked) if asked else newest_checkpoint(args.output_dir)
    before = _read_facts(checkpoint) if checkpoint else {}
    if (was := before.get("world_size", world_size)) == world_size:
        return
    found = f"{checkpoint}: was written by {was} process(es), now there are {world_size}"
    if before.get("launch", "").startswith("ZeRO"):
        raise UserError(
            f"{found}, and DeepSpeed cannot divide the optimizer of a ZeRO checkpoint among another number; "
            f"go on with {was}, or start again in another output_dir"
        )
    if not args.ignore_resume_mismatch:
        remedy = "choose another output_dir, or say ignore_resume_mismatch: true"
        raise UserError(f"{found}; go on with {was}, {remedy}")


def check_data(checkpoint: Path, train_tokens: str, keys: np.ndarray, ignore: bool) -> None:
    """Raises UserError if the run that wrote `checkpoint` trained on other pairs.

    Args:
        train_tokens: of `reference_cache.hash_tokens`.
        keys: [N, 2] of `tokenization.row_keys`; those of the earlier pairs are beside the checkpoint.
    """
    if ignore or _read_facts(checkpoint).get("train_tokens") == train_tokens:
        return
    try:
        counts = ": " + describe_changes(np.load(checkpoint.parent / ROW_KEYS), keys)
    except (OSError, ValueError):  # of an earlier version, or moved away from its run
        counts = ""
    raise UserError(
        f"{checkpoint}: the data have changed since it was written{counts}; go on with the earlier data, start again "
        "in another output_dir, or say ignore_resume_mismatch: true (some pairs then train twice, others never)"
    )


def describe_changes(before: np.ndarray, now: np.ndarray) -> str:
    """How [N, 2] keys of prompts and pairs differ from [M, 2] earlier ones, in words."""
    gone, new = (
        Counter(map(tuple, a.tolist())) - Counter(map(tuple, b.tolist())) for a, b in ((before, now), (now, before))
    )
    prompts = [Counter(prompt for prompt, _ in keys.elements()) for keys in (gone, new)]
    changed = (prompts[0] & prompts[1]).total()
    if not gone and not new:
        return f"the same {len(now):,} pairs are in another order"
    return f"{new.total() - changed:,} rows added, {gone.total() - changed:,} removed, {changed:,} changed"


def check_resume(checkpoint: Path, facts: dict[str, Any], ignore: bool) -> None:
    """Raises UserError if the run that wrote `checkpoint` was launched in another way, or ordered its pairs so."""
    before = {"order_version": 1, "prefix_sharing": False} | _read_facts(checkpoint)
    if before["order_version"] != facts["order_version"] and not ignore:
        raise UserError(
            f"{checkpoint}: was written by a version of this project that put the pairs in another order (version "
            f"{before['order_version']}, now {facts['order_version']}), so some pairs would be trained twice and "
            "others never; finish the run with that version, start again in another output_dir, or say "
            "ignore_resume_mismatch: true"
        )
    if before["prefix_sharing"] != facts["prefix_sharing"] and not ignore:
        raise UserError(
            f"{checkpoint}: was written with prefix_sharing {before['prefix_sharing']}, now it is "
            f"{facts['prefix_sharing']}, under which the lengths of the pairs order them otherwise; go on as before, "
            "choose another output_dir, or say ignore_resume_mismatch: true"
        )
    if before.get("launch") != facts["launch"]:
        raise UserError(
            f"{checkpoint}: was written with launch {before.get('launch')}, now it is {facts['launch']}, which cannot "
            "read its optimizer; go on as before, or choose another output_dir"
        )


def _read_facts(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / COMPLETE).read_text())


# ---- disk


def most_at_once(args: Any, collapse_steps: int) -> int:
    """Checkpoints that a run has at one time: the limit, the one being written, the best, and those that the guard
    keeps, which are two where saves are closer than `collapse_steps` (see health/guard_rules.py)."""
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
            f"output_dir {run}: {format_size(free)} are free, checkpoints will take {format_size(needed)} "
            f"({format_size(size)} each); free space, or choose an output_dir on another disk"
        )


# ---- stopping


def stop_requested(run: str | Path) -> bool:
    return (Path(run) / STOP).is_file()


def clear_stop(run: str | Path) -> None:
    if is_main_process():
        (Path(run) / STOP).unlink(missing_ok=True)


def clear_old_stop(run: str | Path) -> bool:
    """Removes a stop file from before this job; True if there was one. A newer one is meant for this run.

    Raises:
        UserError: a folder of that name, which nothing here removes.
    """
    if (Path(run) / STOP).is_dir():
        raise UserError(f"output_dir {run}: {STOP} in it is a folder, not the file that stops a run; remove it")
    started = float(os.environ.get("SLURM_JOB_START_TIME") or psutil.Process().create_time())
    try:
        old = (Path(run) / STOP).stat().st_mtime < started
    except FileNotFoundError:
        return False
    if old:
        clear_stop(run)
    return old
