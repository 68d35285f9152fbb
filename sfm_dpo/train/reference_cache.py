"""Reference cache: the reference model's log-probs, computed once and kept on disk in shards.

The key covers what changes the log-probs and nothing else. Each shard of pairs is a file of its own, so that a killed
pass resumes where it was, and jobs with one key that run at the same time share the work.
Folder: $HF_HOME/sfm_dpo/reference/<key>.
"""

import errno
import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
import xxhash
from accelerate.utils import is_peft_model
from datasets import Dataset, concatenate_datasets
from datasets.config import HF_CACHE_HOME
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sfm_dpo.common.distributed import broadcast, gather, is_main_process, main_process_first, rank, world_size
from sfm_dpo.common.errors import DiskFull, StopRequested, UserError
from sfm_dpo.common.files import format_clock
from sfm_dpo.common.leases import Lease, describe_owner
from sfm_dpo.data.sources import explain_cache_errors
from sfm_dpo.data.tokenization import pair_tokens
from sfm_dpo.model.loading import hash_config
from sfm_dpo.model.sharding import hash_weights
from sfm_dpo.run.checkpoint import stop_requested
from sfm_dpo.run.folder import write_status

BATCH_TOKENS = {"cuda": 32_768, "cpu": 4_096}  # computed at once: matrix products are no faster with more
CACHE_FORMAT = 2  # raise it when the same key would stand for other log-probs or another layout of the shards
NFS_SECONDS = 60  # its acdirmax: for so long a client may remember that a file was not there
POLL_SECONDS = 0.5  # between looks at the shards that others compute
REPORT_SECONDS = 10.0
SHARD_PAIRS = 256  # at 15,000 tokens/s and 8,192 tokens a sequence, under five minutes of work to lose

log = logging.getLogger(__name__)


def add_reference(trainer: Any) -> None:
    """Gives the trainer's data the columns ref_chosen_logps and ref_rejected_logps, from the cache.

    What the cache lacks is computed first. All ranks must call it, before training: the policy is still the base
    model, also when the run resumes from a checkpoint, which is loaded later.

    Raises:
        StopRequested: the stop file was seen; the shards that were written are kept.
        DiskFull: HF_HOME cannot be written.
    """
    if not trainer.train_config.precompute_ref_log_probs:
        return
    settings = describe_settings(trainer)
    held_out = trainer.eval_dataset or {}
    complete_shards = 0
    for name, dataset in {"train": trainer.train_dataset, **held_out}.items():
        tokens = pair_tokens(dataset, trainer.args.max_length, trainer.prefix_sharing)
        cache = ReferenceCache(cache_folder(dataset, **settings), tokens, choose_batch_tokens(trainer, tokens))
        if not complete_cache(trainer, name, dataset, cache):
            message = f"stopped on request during the reference pass; its shards are kept in {cache.folder}"
            raise StopRequested(message, shards=complete_shards + cache.count())
        complete_shards += len(cache.shards)
        logps = cache.read_all()
        columns = Dataset.from_dict({"ref_chosen_logps": logps[:, 0], "ref_rejected_logps": logps[:, 1]})
        with_columns = concatenate_datasets([dataset, columns], axis=1)
        if name == "train":
            trainer.train_dataset = with_columns
            trainer.reference_folder = cache.folder
        else:
            held_out[name] = with_columns
        if is_main_process():
            trainer.reference_facts[name] = cache.describe(settings)


def describe_settings(trainer: Any) -> dict[str, Any]:
    """What changes the log-probs of given tokens, for `cache_folder`. All ranks must call it."""
    args = trainer.train_config
    model = trainer.forward_model
    weights = trainer._precompute_model_hash  # TRL's, taken before FSDP2 splits them
    adapter = is_peft_model(trainer.model)
    if trainer.is_zero3 or adapter:
        weights = hash_weights(model, gather=trainer.is_zero3, frozen_only=adapter)
    settings = {
        "weights": weights,
        "config": hash_config(trainer.bare_model().config),
        "dtype": next(model.parameters()).dtype,
        "precision": _describe_precision(trainer),
        "attention": trainer.bare_model().config._attn_implementation,
        "kernel": trainer.attention_kernel() if trainer.packed else None,
        "packed": trainer.packed,
        "compilation": {name: getattr(args, name) for name in _COMPILATION},
        "max_length": args.max_length,
        "truncation_mode": args.truncation_mode,
    }
    if trainer.prefix_sharing:  # a key without it is that of a cache from before there was such a thing
        settings["prefix_sharing"] = True
    return settings


_COMPILATION = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


def _describe_precision(trainer: Any) -> str:
    """What computes in which precision: in 16 bit the launchers differ."""
    mixed = trainer.accelerator.mixed_precision
    if mixed == "no":
        return mixed
    if trainer.zero_stage:
        return f"{mixed}, DeepSpeed"
    return f"{mixed}, FSDP2" if trainer.is_fsdp_enabled else f"{mixed}, autocast"


def choose_batch_tokens(trainer: Any, lengths: np.ndarray) -> int:
    """Tokens computed at once, padding counted. It depends on nothing but the device, so that all jobs that share a
    cache compute alike; or as many of the longest pairs as `precompute_ref_batch_size` says."""
    if pairs := trainer.args.precompute_ref_batch_size:
        return pairs * int(lengths.max(initial=1))
    tokens = BATCH_TOKENS[trainer.accelerator.device.type]
    return tokens if trainer.packed else tokens // 2


def complete_cache(trainer: Any, name: str, dataset: Dataset, cache: "ReferenceCache") -> bool:
    """Computes the missing shards of a split. Returns False where the stop file was seen."""
    # Rank 0 alone looks: on NFS who looks for a file before it is written may not see it for a minute
    missing = broadcast(cache.missing_shards() if is_main_process() else [])
    complete = len(cache.shards) - len(missing)
    log.info(f"reference log-probs of the {name} pairs: {complete} of {len(cache.shards)} shards in {cache.folder}")
    if not missing:
        return True
    main_process_first(lambda: make_folder(cache.folder))
    log.info(f"reference, {name}: up to {cache.batch_tokens:,} tokens at once, and at least a pair")
    progress = Progress(trainer, name, cache.count_tokens(missing))

    def forward(rows: np.ndarray) -> torch.Tensor:
        batch = trainer.load_batch(dataset, rows)
        return torch.stack(trainer.compute_ref_log_probs(trainer.forward_model, batch), dim=1)

    def should_stop() -> bool:
        return stop_requested(trainer.args.output_dir)

    if not cache.compute(missing, forward, progress.report, should_stop):
        return False
    computed = broadcast(cache.computed)
    log.info(f"reference, {name}: {computed} shards computed here, {len(missing) - computed} by other jobs")
    return True


class Progress:
    """Writes how far the pass is into the log and status.json, at most every REPORT_SECONDS."""

    def __init__(self, trainer: Any, name: str, total: int):
        self.trainer = trainer
        self.name = name
        self.total = total
        self.begin = time.monotonic()
        self.reported = self.begin

    def report(self, tokens_left: int, holder: str = "") -> None:
        """`holder`: who computes what this job waits for."""
        self.trainer.position.advance()
        now = time.monotonic()
        if now - self.reported < REPORT_SECONDS and tokens_left:
            return
        self.reported = now
        done = self.total - tokens_left
        rate = done / max(now - self.begin, 1e-9)
        line = f"reference, {self.name}: {done / self.total:.0%} of {self.total:,} tokens, {rate:,.0f} tokens/s"
        if holder:
            line += f", waiting for {holder}"
        elif done:
            line += f", ETA {format_clock(int(tokens_left / rate))}"
        log.info(line)
        write_status(self.trainer.args.output_dir, "running", message=line)


def cache_folder(dataset: Dataset, **settings: object) -> Path:
    """Folder of the shards for these token ids and settings (`describe_settings`)."""
    settings |= {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    settings |= {"format": CACHE_FORMAT}
    text = json.dumps({key: str(value) for key, value in sorted(settings.items())})
    digest = hashlib.sha256(f"{text} {hash_tokens(dataset)}".encode()).hexdigest()[:24]
    return _root() / digest


def _root() -> Path:
    return Path(os.path.expanduser(HF_CACHE_HOME)) / "sfm_dpo" / "reference"


def make_folder(folder: Path | None = None) -> None:
    """Makes the folder of a cache, or that of all. Raises UserError if it cannot be written."""
    folder = folder or _root()
    with explain_cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "cannot be written", str(folder))


class ReferenceCache:
    """Shards of a dataset's reference log-probs.

    Args:
        folder: of `cache_folder`.
        lengths: [N] tokens of each pair after truncation; the rows of a shard depend on them alone: longest pairs
            first, so that a batch holds pairs of one length.
        batch_tokens: computed at once, and at least one pair.
    """

    def __init__(self, folder: Path, lengths: np.ndarray, batch_tokens: int = 0):
        self.folder = folder
        self.lengths = lengths
        self.batch_tokens = batch_tokens
        order = np.argsort(-lengths, kind="stable")
        size = max(1, min(SHARD_PAIRS, math.ceil(len(order) / 64)))
        self.shards = [order[i : i + size] for i in range(0, len(order), size)]
        self.computed = 0  # shards, by this job; rank 0 counts
        self._leases: dict[int, Lease] = {}  # of the shards that this process has tried to take

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"

    def missing_shards(self) -> list[int]:
        return [number for number in range(len(self.shards)) if not self.is_done(number)]

    def is_done(self, number: int) -> bool:
        return read_shard(self.path(number), self.shards[number]) is not None

    def count(self) -> int:
        """Shards that exist, complete or damaged."""
        return sum(self.path(n).exists() for n in range(len(self.shards)))

    def count_tokens(self, numbers: list[int]) -> int:
        return int(sum(self.lengths[self.shards[number]].sum() for number in numbers))

    def batches(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits rows, longest first, into batches of at most `batch_tokens` tokens, padding counted."""
        out = []
        start = 0
        while start < len(rows):
            size = max(1, self.batch_tokens // max(1, int(self.lengths[rows[start]])))
            out.append(rows[start : start + size])
            start += size
        return out

    def compute(
        self,
        numbers: list[int],
        forward: Callable[[np.ndarray], torch.Tensor],
        report: Callable[[int, str], None],
        should_stop: Callable[[], bool],
    ) -> bool:
        """Computes the shards that no other job computes, and waits for the others. Returns False if it was stopped.

        All ranks must call it: under ZeRO-3 and FSDP2 each forward needs all of them. Rank 0 leases as many shards as
        there are ranks, looks for the stop file, and writes.

        Args:
            forward: rows of a batch -> [B, 2] sums of log-probs, chosen and rejected.
            report: is told the tokens still to compute, and who has the shards that this job waits for.
            should_stop: asked on rank 0 before each round.

        Raises:
            DiskFull: HF_HOME cannot be written; on rank 0 alone.
        """
        todo = numbers
        with explain_cache_errors(self.folder, DiskFull):
            while todo:
                if broadcast(should_stop()):
                    return False
                mine, todo, holder = broadcast(self._take(todo))
                if not mine and todo:
                    report(self.count_tokens(todo), holder)
                    time.sleep(POLL_SECONDS)
                try:
                    for left in self._compute_batches(mine, forward):
                        report(left + self.count_tokens(todo), "")
                        if broadcast(should_stop()):
                            return False
                finally:
                    for number in mine:
                        self._lease(number).release()
        return True

    def _compute_batches(self, numbers: list[int], forward: Callable[[np.ndarray], torch.Tensor]) -> Iterator[int]:
        """Computes shards, whose batches the ranks take in turn; yields the tokens left after each round.

        A last round with too few batches is filled up with its last batch, whose further results are dropped.
        """
        work = [(number, rows) for number in numbers for rows in self.batches(self.shards[number])]
        parts: dict[int, list[np.ndarray]] = {number: [] for number in numbers}
        left = self.count_tokens(numbers)
        for start in range(0, len(work), world_size()):
            turn = work[start : start + world_size()]
            _, mine = turn[min(rank(), len(turn) - 1)]
            results = gather(forward(mine).float().cpu().numpy())
            for (number, rows), logps in zip(turn, results, strict=False):
                parts[number].append(logps)
                left -= int(self.lengths[rows].sum())
                if is_main_process() and sum(map(len, parts[number])) == len(self.shards[number]):
                    self._write(number, np.concatenate(parts[number]))
            yield left

    def _take(self, todo: list[int]) -> tuple[list[int], list[int], str]:
        """On rank 0: the shards that this job computes next, as many as there are ranks; those left; who has the first
        of these."""
        mine: list[int] = []
        left: list[int] = []
        holder = ""
        if not is_main_process():
            return mine, left, holder
        for number in todo:
            if len(mine) == world_size():
                left.append(number)
            elif self.is_done(number):
                continue
            elif not self._lease(number).take():
                left.append(number)
                holder = holder or describe_owner(self._lease(number).path)
            elif self.is_done(number):  # looked at again: the new file in the folder makes NFS ask the server
                self._lease(number).release()
            else:
                mine.append(number)
        return mine, left, holder

    def _lease(self, number: int) -> Lease:
        return self._leases.setdefault(number, Lease(self.path(number).with_suffix(".lease")))

    def _write(self, number: int, logps: np.ndarray) -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        provenance = {"batch_tokens": self.batch_tokens, "device": device}
        write_shard(self.path(number), self.shards[number], logps, provenance)
        self.computed += 1

    def read_all(self) -> np.ndarray:
        """[N, 2] log-probs of all rows. Raises UserError where a shard that rank 0 has seen cannot be read, also after
        the time for which NFS may remember that a file is not there."""
        logps = np.empty((len(self.lengths), 2), dtype=np.float32)
        patience = time.monotonic() + NFS_SECONDS
        for number, rows in enumerate(self.shards):
            shard = read_shard(self.path(number), rows)
            while shard is None and time.monotonic() < patience:
                time.sleep(1)
                shard = read_shard(self.path(number), rows)
            if shard is None:
                where = f"{self.path(number)}: not there on {platform.node()}"
                raise UserError(f"{where}; HF_HOME must be a folder that all nodes share")
            logps[rows] = shard
        return logps

    def describe(self, settings: dict[str, Any]) -> dict[str, Any]:
        """For data.json: the key, what it covers, and how the shards were made.

        `made` is a list, because several jobs may have computed shards of one cache with batches of other sizes: in
        16 bit such a cache differs from what the run itself would compute, by rounding.
        """
        provenances: list[dict[str, Any]] = []
        for number in range(len(self.shards)):
            with safe_open(self.path(number), "numpy") as file:
                entry = json.loads((file.metadata() or {}).get("made", "{}"))
            if entry not in provenances:
                provenances.append(entry)
        return {"key": self.folder.name, **{name: str(value) for name, value in settings.items()}, "made": provenances}


def write_shard(path: Path, rows: np.ndarray, logps: np.ndarray, provenance: dict[str, Any] | None = None) -> None:
    """Atomic: the file is complete or absent. `logps` is [n, 2] float32, computed as `provenance` says."""
    data: dict[str, np.ndarray] = {
        "rows": np.ascontiguousarray(rows, dtype=np.int64),
        "logps": np.ascontiguousarray(logps, dtype=np.float32),
    }
    metadata = {
        "checksum": _checksum(data["rows"], data["logps"]),
        "made": json.dumps(provenance or {}, sort_keys=True),
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(save(data, metadata))  # save_file makes files that nobody else can read
    partial.replace(path)


def read_shard(path: Path, rows: np.ndarray) -> np.ndarray | None:
    """[n, 2] log-probs of `rows`, or None where the file is absent, damaged, or about other rows.

    Raises:
        UserError: a folder of that name.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder where a shard of the reference cache belongs; remove it")
    try:
        with safe_open(path, "numpy") as file:
            stored, logps = file.get_tensor("rows"), file.get_tensor("logps")
            checksum = (file.metadata() or {}).get("checksum")
    except (OSError, SafetensorError, ValueError):
        return None
    if checksum != _checksum(stored, logps) or not np.array_equal(stored, rows) or not np.isfinite(logps).all():
        return None
    return logps


def hash_tokens(dataset: Dataset) -> str:
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
