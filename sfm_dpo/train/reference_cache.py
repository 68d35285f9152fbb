"""Reference cache: the reference model's log-probs, computed once, in shards in $HF_HOME/sfm_dpo/reference/<key>.

The key covers what changes the log-probs and nothing else. A killed pass resumes at its first missing shard. One job
at a time computes; others with the same key wait for it and read what it has written.
"""

import dataclasses
import errno
import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
import xxhash
from datasets import Dataset, concatenate_datasets
from datasets.config import HF_CACHE_HOME
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sfm_dpo.common.distributed import (
    gather_values,
    is_main_process,
    main_process_first,
    on_main_process,
    rank,
    world_size,
)
from sfm_dpo.common.errors import DiskFull, StopRequested, UserError, user_input
from sfm_dpo.common.files import format_clock, write_atomically
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.data.sources import explain_cache_errors
from sfm_dpo.data.tokenization import hash_tokens
from sfm_dpo.model.loading import hash_config, identify_model
from sfm_dpo.run.checkpoint import stop_requested
from sfm_dpo.run.facts import ForwardPath
from sfm_dpo.run.folder import State, write_status
from sfm_dpo.run.lock import Lease, describe_owner, read_owner
from sfm_dpo.train.base_model import BaseModel

BATCH_TOKENS = {"cuda": 32_768, "cpu": 4_096}  # per batch, including padding; the same for all jobs of a cache
COMPILATION = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
CACHE_FORMAT = 4  # raise it when the same key would mean other log-probs or another layout of the shards
POLL_SECONDS = 2.0  # between attempts to take the lease
REPORT_SECONDS = 10.0
Score = Callable[[np.ndarray], torch.Tensor]  # rows of a batch -> [B, 2] sums of log-probs, chosen and rejected
Report = Callable[[int, int, str], None]  # tokens done, tokens to do, owner of the lease that this job waits for
SHARD_TOKENS = {"cuda": 524_288, "cpu": 512}  # a kill loses 35 s of work at 15,000 tokens/s, 11 s at 45

log = logging.getLogger(__name__)


def add_reference(base: BaseModel, path: ForwardPath, pairs: Pairs) -> tuple[Pairs, dict[str, Any]]:
    """The pairs with the columns ref_chosen_logps and ref_rejected_logps, and by split the key of its cache with the
    key's parts. All ranks must call it. Raises StopRequested, DiskFull, and UserError for a log-prob that is not
    finite."""
    args = base.config.train
    if not args.precompute_ref_log_probs:
        return pairs, {}
    caches = {}
    splits = dict(pairs.splits)
    shards = 0
    with base.computing(path), base.progress.during("the reference's forward"):
        key = describe_key(base, path)
        for name, dataset in splits.items():
            lengths = Lengths.of(dataset).truncate(args.max_length).computed(path.prefix_sharing)
            batch_tokens = BATCH_TOKENS[base.device.type] // (1 if path.packed else 2)
            if size := args.precompute_ref_batch_size:
                batch_tokens = size * int(lengths.max(initial=1))
            cache = ReferenceCache(cache_folder(dataset, key), lengths, batch_tokens, SHARD_TOKENS[base.device.type])
            report = report_progress(base, name, cache, shards)
            score = functools.partial(base.score, dataset, by_reference=True)
            try:
                logps = cached_logps(name, cache, score, report)
            except NotFinite as error:
                pair = dataset[error.status["pair"]]
                remedy = "remove that row, or use another dtype"
                raise UserError(f"{pair['source']}: row {pair['row']}: {error}; {remedy}") from error
            shards += len(cache.shards)
            caches[name] = {"key": cache.folder.name} | {part: str(key[part]) for part in key}
            columns = Dataset.from_dict({"ref_chosen_logps": logps[:, 0], "ref_rejected_logps": logps[:, 1]})
            splits[name] = concatenate_datasets([dataset, columns], axis=1)
    return dataclasses.replace(pairs, splits=splits), caches


class NotFinite(UserError):
    """A log-prob of the reference is NaN or infinite: that of the pair at position `status["pair"]` of the data."""


def describe_key(base: BaseModel, path: ForwardPath) -> dict[str, Any]:
    """What changes the log-probs that the reference gives the same tokens, for `cache_folder`. All ranks must call
    it, while it computes by `path`."""
    args = base.config.train
    bare = base.unwrapped_reference()
    precision = base.precision
    if precision != "no":  # in 16 bit, precision depends on the launcher
        regime = "FSDP2" if base.is_fsdp else "autocast"
        precision = f"{precision}, {'DeepSpeed' if base.zero_stage else regime}"
    return {
        "model": identify_model(base.config.parts[-1]),
        "model_init_kwargs": args.model_init_kwargs,
        "config": hash_config(bare.config),
        "device": base.device.type,
        "dtype": next(base.reference.parameters()).dtype,
        "precision": precision,
        "attention": bare.config._attn_implementation,
        "kernel": base.attention_kernel(bare) if path.packed else None,
        "prefix_sharing": path.prefix_sharing,
        "compilation": {name: getattr(args, name) for name in COMPILATION},
        "max_length": args.max_length,
        "truncation_mode": args.truncation_mode,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "trl": trl.__version__,
        "format": CACHE_FORMAT,
    }


def cache_folder(dataset: Dataset, key: dict[str, Any]) -> Path:
    text = json.dumps({part: str(value) for part, value in sorted(key.items())})
    digest = hashlib.sha256(f"{text} {hash_tokens(dataset)}".encode()).hexdigest()[:24]
    return reference_root() / digest


def reference_root() -> Path:
    return Path(HF_CACHE_HOME).expanduser() / "sfm_dpo" / "reference"


def make_cache_folder(folder: Path) -> None:
    remedy = "set HF_HOME (in .env) to another folder"
    with user_input(f"HF_HOME: {folder}: cannot be made", remedy), explain_cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "cannot be written", str(folder))


def report_progress(base: BaseModel, name: str, cache: "ReferenceCache", earlier_shards: int) -> Report:
    """A function that logs the reference pass of a split, and raises StopRequested if the run is asked to stop."""
    began = time.monotonic()
    reported = began
    output_dir = base.config.train.output_dir

    def report(done: int, total: int, owner: str) -> None:
        nonlocal began, reported
        base.progress.advance()
        now = time.monotonic()
        if not done:  # another job computes
            began = now
        if now - reported > REPORT_SECONDS:
            reported = now
            message = f"reference, {name}: {done / total:.0%} of {total:,} tokens"
            if owner:
                message += f", waiting for {owner}"
            if done:
                message += f", ETA {format_clock((now - began) / done * (total - done))}"
            log.info(message)
            write_status(output_dir, State.RUNNING, message=message)
        if on_main_process(lambda: stop_requested(output_dir)):
            message = f"stopped on request during the reference pass; its shards are kept in {cache.folder}"
            missing = on_main_process(cache.missing_shards)
            shards = earlier_shards + len(cache.shards) - len(missing)
            raise StopRequested(message, shards=shards)  # a batch script requeues the job if their number has grown

    return report


def cached_logps(name: str, cache: "ReferenceCache", score: Score, report: Report) -> np.ndarray:
    """[N, 2] sums of log-probs (nats) of all rows: read, or computed where the cache lacks them. All ranks must call
    it: under ZeRO-3 and FSDP2 each forward needs all of them. Raises DiskFull."""
    # Only rank 0 reads: on NFS, a client that looks for a file before it is written may not see it for a minute
    missing = on_main_process(cache.missing_shards)
    complete = len(cache.shards) - len(missing)
    log.info(f"reference log-probs of the {name} pairs: {complete} of {len(cache.shards)} shards in {cache.folder}")
    if missing:
        main_process_first(lambda: make_cache_folder(cache.folder))
        with explain_cache_errors(cache.folder, DiskFull):
            cache.compute(missing, score, report)
    return on_main_process(cache.read_all)


class ReferenceCache:
    """Shards of a dataset's reference log-probs, longest pairs first, so that a batch holds pairs of similar length.
    `lengths` [N]: tokens of each pair after truncation; `batch_tokens`: tokens per batch (at least one pair), with
    padding; `shard_tokens`: tokens after which a shard ends."""

    def __init__(self, folder: Path, lengths: np.ndarray, batch_tokens: int, shard_tokens: int):
        self.folder = folder
        self.lengths = lengths
        self.batch_tokens = batch_tokens
        order = np.argsort(-lengths, kind="stable")
        begins = np.cumsum(lengths[order]) - lengths[order]
        self.shards = np.split(order, np.flatnonzero(np.diff(begins // shard_tokens)) + 1)
        self.lease = Lease(folder / "lease")

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"

    def missing_shards(self) -> list[int]:
        return [number for number in range(len(self.shards)) if self.read(number) is None]

    def read(self, number: int) -> np.ndarray | None:
        return read_shard(self.path(number), self.shards[number])

    def count_tokens(self, numbers: list[int]) -> int:
        return int(sum(self.lengths[self.shards[number]].sum() for number in numbers))

    def batches(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits rows, longest first, into batches of at most `batch_tokens` tokens, including padding."""
        batches = []
        while len(rows):
            size = max(1, self.batch_tokens // max(1, int(self.lengths[rows[0]])))
            batches.append(rows[:size])
            rows = rows[size:]
        return batches

    def compute(self, missing: list[int], score: Score, report: Report) -> None:
        """Computes the missing shards, or waits for the job that holds the lease. Only rank 0 takes the lease and
        writes. `report` is called with the tokens done and to do, and the owner that this job waits for; it may
        raise."""
        total = self.count_tokens(missing)
        while not on_main_process(self.lease.take):
            report(0, total, describe_owner(read_owner(self.lease.path)) if is_main_process() else "")
            time.sleep(POLL_SECONDS)
        try:
            # The last owner of the lease may have computed some of them
            missing = on_main_process(self.missing_shards)
            for left in self._compute_batches(missing, score):
                report(total - left, total, "")
        finally:
            self.lease.release()

    def _compute_batches(self, numbers: list[int], score: Score) -> Iterator[int]:
        """Computes shards; the ranks take their batches in turn. Yields the tokens left after each round."""
        work = [(number, rows) for number in numbers for rows in self.batches(self.shards[number])]
        parts: dict[int, list[np.ndarray]] = {number: [] for number in numbers}
        left = self.count_tokens(numbers)
        for start in range(0, len(work), world_size()):
            turn = work[start : start + world_size()]
            _, mine = turn[min(rank(), len(turn) - 1)]  # ranks without a batch repeat the last one
            results = gather_values(score(mine).float().cpu().numpy())
            for (number, rows), logps in zip(turn, results, strict=False):
                parts[number].append(logps)
                left -= int(self.lengths[rows].sum())
                if sum(map(len, parts[number])) == len(self.shards[number]):
                    self._finish_shard(number, np.concatenate(parts[number]), score)
            yield left

    def _finish_shard(self, number: int, logps: np.ndarray, score: Score) -> None:
        """Computes the rows of `logps` that are not finite once more, each alone, and writes the shard. All ranks must
        call it. Raises NotFinite."""
        rows = self.shards[number]
        for bad in np.flatnonzero(~np.isfinite(logps).all(axis=1)):
            logps[bad] = score(rows[bad : bad + 1]).float().cpu().numpy()
        on_main_process(lambda: write_shard(self.path(number), rows, logps))

    def read_all(self) -> np.ndarray:
        """[N, 2] log-probs of all rows."""
        logps = np.empty((len(self.lengths), 2), dtype=np.float32)
        for number, rows in enumerate(self.shards):
            logps[rows] = self.read(number)
        return logps


def write_shard(path: Path, rows: np.ndarray, logps: np.ndarray) -> None:
    """Writes atomically: the file is complete or absent. `logps` is [n, 2]. Raises NotFinite, and writes nothing."""
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    logps = np.ascontiguousarray(logps, dtype=np.float32)
    bad = rows[~np.isfinite(logps).all(axis=1)]
    if len(bad):
        raise NotFinite("the reference's log-probs of this pair are not finite", pair=int(bad[0]))
    # save_file would make a file that other users cannot read
    write_atomically(path, save({"rows": rows, "logps": logps}, {"checksum": _checksum(rows, logps)}))


def read_shard(path: Path, rows: np.ndarray) -> np.ndarray | None:
    """[n, 2] log-probs of `rows`, or None if the file is absent, damaged, or holds other rows."""
    try:
        with safe_open(path, "numpy") as file:
            logps = file.get_tensor("logps")
            checksum = (file.metadata() or {}).get("checksum")
    except (OSError, SafetensorError, ValueError):
        return None
    return logps if checksum == _checksum(rows, logps) and np.isfinite(logps).all() else None


def _checksum(rows: np.ndarray, logps: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(rows.tobytes() + logps.tobytes())
