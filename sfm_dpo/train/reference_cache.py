"""What did the base think? The reference model's log-probs, computed once and kept on disk.

TRL 1.16's own cache is keyed by every training argument (another lr computes again), is written once at the end
(a killed job starts over), and fails with several ranks on an in-memory dataset. Here the key covers what changes the
figures and nothing else, and each shard of pairs is a file of its own. Folder: $HF_HOME/sfm_dpo/reference/<key>.
"""

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
import trl
import xxhash
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from datasets.config import HF_CACHE_HOME
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from sfm_dpo.train.trainer import SFMDPOTrainer

from sfm_dpo.common.errors import StopRequested, UserError
from sfm_dpo.data.tokenization import pair_tokens
from sfm_dpo.model.sharding import gathered_hash
from sfm_dpo.run.checkpoint import stop_requested
from sfm_dpo.run.folder import write_status
from sfm_dpo.train import reference_cache

NFS_SECONDS = 60  # its acdirmax: for so long a client may remember that a file was not there
SHARD_PAIRS = 256  # at 15,000 tokens/s and 8,192 tokens a sequence, under five minutes of work to lose


def cache_folder(dataset: Dataset, **settings: object) -> Path:
    """Folder of the shards for these token ids and settings (weights, dtype, attention, truncation, ...)."""
    settings |= {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    described = json.dumps({key: str(value) for key, value in sorted(settings.items())})
    digest = hashlib.sha256(f"{described} {token_hash(dataset)}".encode()).hexdigest()[:24]
    return Path(os.path.expanduser(HF_CACHE_HOME)) / "sfm_dpo" / "reference" / digest


def shard_indices(lengths: np.ndarray) -> list[np.ndarray]:
    """Rows of each shard: longest pairs first, so that a batch holds pairs of one length. Depends on nothing else.

    Args:
        lengths: [N], tokens of a pair after truncation.
    """
    order = np.argsort(-lengths, kind="stable")
    size = max(1, min(SHARD_PAIRS, math.ceil(len(order) / 64)))
    return [order[i : i + size] for i in range(0, len(order), size)]


def batches(rows: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Splits rows, longest first, into batches of at most `budget` tokens, padding counted."""
    out, start = [], 0
    while start < len(rows):
        size = max(1, budget // max(1, int(lengths[rows[start]])))
        out.append(rows[start : start + size])
        start += size
    return out


def compute_shards(
    folder: Path,
    shards: list[np.ndarray],
    mine: list[int],
    lengths: np.ndarray,
    budget: int,
    forward: Callable[[np.ndarray], torch.Tensor],
    report: Callable[[int], None] = lambda tokens: None,
    should_stop: Callable[[], bool] = lambda: False,
    made: dict[str, Any] | None = None,
) -> bool:
    """Computes and writes the shards numbered `mine`. Returns whether all of them are done.

    Args:
        forward: rows of a batch -> [B, 2] sums of log-probs, chosen and rejected.
        report: told the tokens of each batch done.
        should_stop: asked before each shard.
        made: how they are computed, beyond what the key covers; kept in each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in mine:
        if should_stop():
            return False
        logps = []
        for rows in batches(shards[number], lengths, budget):
            logps.append(forward(rows).float().cpu().numpy())
            report(int(lengths[rows].sum()))
        write_shard(folder / f"{number:06}.safetensors", shards[number], np.concatenate(logps), made)
    return True


def compute_in_lockstep(
    folder: Path,
    shards: list[np.ndarray],
    todo: list[int],
    lengths: np.ndarray,
    budget: int,
    forward: Callable[[np.ndarray], torch.Tensor],
    rank: int,
    ranks: int,
    gather: Callable[[list], list],
    report: Callable[[int], None] = lambda tokens: None,
    should_stop: Callable[[], bool] = lambda: False,
    made: dict[str, Any] | None = None,
) -> bool:
    """As compute_shards, for weights that are split over the ranks: each forward needs all of them.

    The batches of the shards `todo` are dealt out in turn, so those of one round are about as long; the last round is
    filled up with its last batch, whose further results nobody reads. Rank 0 writes.

    Args:
        gather: a list on each rank -> the lists of all ranks as one.
        should_stop: asked before each round; must answer the same on all ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = [(number, rows) for number in todo for rows in batches(shards[number], lengths, budget)]
    parts: dict[int, list[np.ndarray]] = {number: [] for number in todo}
    for start in range(0, len(work), ranks):
        if should_stop():
            return False
        _, rows = work[min(start + rank, len(work) - 1)]
        results = gather([forward(rows).float().cpu().numpy()])
        for (number, rows), logps in zip(work[start : start + ranks], results, strict=False):
            parts[number].append(logps)
            report(int(lengths[rows].sum()))
            if rank == 0 and sum(map(len, parts[number])) == len(shards[number]):
                path = folder / f"{number:06}.safetensors"
                write_shard(path, shards[number], np.concatenate(parts.pop(number)), made)
    return True


def write_shard(path: Path, rows: np.ndarray, logps: np.ndarray, made: dict[str, Any] | None = None) -> None:
    """Atomic: the file is whole or absent. `logps` is [n, 2] float32, `made` says how they were computed."""
    data: dict[str, np.ndarray] = {
        "rows": np.ascontiguousarray(rows, dtype=np.int64),
        "logps": np.ascontiguousarray(logps, dtype=np.float32),
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    checksum = _checksum(data["rows"], data["logps"])
    save_file(data, partial, metadata={"checksum": checksum, "made": json.dumps(made or {}, sort_keys=True)})
    partial.replace(path)


def read_shard(path: Path, rows: np.ndarray) -> np.ndarray | None:
    """[n, 2] log-probs of `rows`, or None where the file is absent, damaged, or about other rows."""
    try:
        with safe_open(path, "numpy") as file:
            stored, logps = file.get_tensor("rows"), file.get_tensor("logps")
            checksum = (file.metadata() or {}).get("checksum")
    except (OSError, SafetensorError, ValueError):
        return None
    if checksum != _checksum(stored, logps) or not np.array_equal(stored, rows) or not np.isfinite(logps).all():
        return None
    return logps


def read_all(paths: list[Path], shards: list[np.ndarray]) -> np.ndarray:
    """[N, 2] log-probs of all rows. Raises UserError where a shard that another rank wrote cannot be read, also after
    the time for which NFS may remember that a file is not there."""
    logps = np.empty((sum(len(rows) for rows in shards), 2), dtype=np.float32)
    for path, rows in zip(paths, shards, strict=True):
        shard, patience = read_shard(path, rows), time.monotonic() + NFS_SECONDS
        while shard is None and time.monotonic() < patience:
            time.sleep(1)
            shard = read_shard(path, rows)
        if shard is None:
            raise UserError(f"{path}: not there on {platform.node()}; HF_HOME must be a folder that all nodes share")
        logps[rows] = shard
    return logps


def describe_cache(folder: Path, paths: list[Path], settings: dict[str, Any]) -> dict[str, Any]:
    """For data.json: the key, what it covers, and how the shards were made.

    `made` is a list, because several runs may have computed shards of one cache, each with a batch of its own shape:
    in 16 bit such a cache differs from what the run itself would compute, by rounding.
    """
    made = []
    for path in paths:
        with safe_open(path, "numpy") as file:
            entry = json.loads((file.metadata() or {}).get("made", "{}"))
        if entry not in made:
            made.append(entry)
    return {"key": folder.name, **{name: str(value) for name, value in settings.items()}, "made": made}


class Progress:
    """Prints how far the pass is, at most every `every` seconds: a job's log is no place for a progress bar."""

    def __init__(self, what: str, total: int, tell: Callable[[str], None] = print, every: float = 10.0):
        self.what, self.total, self.tell, self.every = what, total, tell, every
        self.done, self.start, self.shown = 0, time.monotonic(), time.monotonic()

    def __call__(self, tokens: int) -> None:
        self.done += tokens
        now = time.monotonic()
        if now - self.shown < self.every and self.done < self.total:
            return
        self.shown, rate = now, self.done / max(now - self.start, 1e-9)
        left = int((self.total - self.done) / rate)
        self.tell(
            f"{self.what}: {self.done / self.total:.0%} of {self.total:,} tokens, {rate:,.0f} tokens/s, "
            f"ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}"
        )


def token_hash(dataset: Dataset) -> str:
    """Hash of the ids of all rows, in order."""
    digest = xxhash.xxh3_128()
    columns = ["prompt_ids", "chosen_ids", "rejected_ids"]
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=1000):
        for name in columns:
            column = table.column(name).combine_chunks()
            digest.update(np.ascontiguousarray(column.value_lengths().to_numpy()).tobytes())
            digest.update(np.ascontiguousarray(column.flatten().to_numpy()).tobytes())
    return digest.hexdigest()


def _checksum(rows: np.ndarray, logps: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(rows.tobytes() + logps.tobytes())


def fill(trainer: "SFMDPOTrainer", dataset: Dataset, name: str, batch_size: int) -> Dataset:
    """ref_chosen_logps and ref_rejected_logps of `dataset`, [N] each, from the cache, which it completes.

    Args:
        name: train or eval, for the log.
        batch_size: as many tokens as so many of the longest pairs are computed at once.

    Raises:
        StopRequested: the stop file was seen; the shards done are kept.
    """
    args, accelerator, device = trainer.args, trainer.accelerator, trainer.accelerator.device
    model = trainer.forward_model()
    model.eval()
    settings = {
        "weights": gathered_hash(model) if trainer.is_zero3 else trainer._precompute_model_hash,
        "dtype": next(model.parameters()).dtype,
        "autocast": accelerator.mixed_precision,
        "attention": trainer._bare_model().config._attn_implementation,
        "packed": trainer._packed,
        "compilation": trainer._compilation,
        "max_length": args.max_length,
        "truncation_mode": args.truncation_mode,
        "ld_alpha": trainer.ld_alpha,
    }
    folder = reference_cache.cache_folder(dataset, **settings)
    lengths = pair_tokens(dataset, args.max_length)
    shards = reference_cache.shard_indices(lengths)
    paths = [folder / f"{number:06}.safetensors" for number in range(len(shards))]
    missing: list[list[int]] = [[]]
    if accelerator.is_main_process:  # who looks for a file before it is written may on NFS not see it for a minute
        missing = [[n for n, path in enumerate(paths) if reference_cache.read_shard(path, shards[n]) is None]]
    broadcast_object_list(missing, from_process=0)
    todo, rank, ranks = missing[0], accelerator.process_index, accelerator.num_processes
    if accelerator.is_main_process:
        state = f"{len(shards) - len(todo)} of {len(shards)} shards in {folder}"
        print(f"reference log-probs of the {name} pairs: {state}", flush=True)

    def tell(line: str) -> None:  # hours may pass here: the log and status.json say that it moves
        print(line, flush=True)
        write_status(args.output_dir, "running", message=line)

    def forward(rows: np.ndarray) -> torch.Tensor:
        batch = trainer._prepare_inputs(trainer.data_collator([dataset[int(i)] for i in rows]))
        with mode():
            return torch.stack(trainer.compute_ref_log_probs(model, batch), dim=1)

    def agreed_stop() -> bool:
        seen = [rank == 0 and stop_requested(args.output_dir)]
        broadcast_object_list(seen, from_process=0)
        return seen[0]

    together = trainer.forwards_in_lockstep()
    mode = torch.no_grad if together else torch.inference_mode  # gathered weights outlive the forward
    mine = todo if together else todo[rank::ranks]
    progress = reference_cache.Progress(f"reference, {name}", sum(int(lengths[shards[n]].sum()) for n in mine), tell)
    report = progress if rank == 0 else lambda tokens: None
    budget = batch_size * int(lengths.max(initial=1))  # as many tokens as `batch_size` of the longest pairs
    made: dict[str, Any] = {"batch_size": batch_size, "batch_tokens": budget}
    made |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type}
    if together:
        done = reference_cache.compute_in_lockstep(
            folder, shards, mine, lengths, budget, forward, rank, ranks, gather_object, report, agreed_stop, made
        )
    else:
        done = reference_cache.compute_shards(
            folder, shards, mine, lengths, budget, forward, report, lambda: stop_requested(args.output_dir), made
        )
    finished = accelerator.gather(torch.tensor([done], device=device)).all().item()
    if not finished:
        count = sum(path.exists() for path in paths) + trainer._reference_shards
        message = f"stopped on request during the reference pass; its shards are kept in {folder}"
        raise StopRequested(message, shards=count)
    trainer._reference_shards += len(shards)
    trainer._reference_folder = folder
    logps = reference_cache.read_all(paths, shards)
    if accelerator.is_main_process:
        trainer.data_facts["reference"][name] = reference_cache.describe_cache(folder, paths, settings)
    return Dataset.from_dict({"ref_chosen_logps": logps[:, 0], "ref_rejected_logps": logps[:, 1]})
