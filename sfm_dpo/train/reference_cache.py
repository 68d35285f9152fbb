"""Reference cache: the reference model's log-probs, computed once and kept on disk in shards.

The key covers what changes the figures and nothing else; each shard of pairs is a file of its own, so
that a killed pass goes on where it was, and jobs of one key that run at the same time share the work.
Folder: $HF_HOME/sfm_dpo/reference/<key>.
"""

import errno
import hashlib
import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
import xxhash
from datasets import Dataset
from datasets.config import HF_CACHE_HOME
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sfm_dpo.common.errors import DiskFull, UserError
from sfm_dpo.common.files import format_clock, write_atomically
from sfm_dpo.common.leases import Lease, describe_owner, this_process
from sfm_dpo.data.sources import explain_cache_errors
from sfm_dpo.run.folder import write_status

NFS_SECONDS = 60  # its acdirmax: for so long a client may remember that a file was not there
BATCH = "batch.json"
CACHE_FORMAT = 2  # raise it when the same key would stand for other figures or another layout of the shards
POLL_SECONDS = 0.5  # between looks at the shards that others compute
SHARD_PAIRS = 256  # at 15,000 tokens/s and 8,192 tokens a sequence, under five minutes of work to lose

log = logging.getLogger(__name__)


def cache_folder(dataset: Dataset, **settings: object) -> Path:
    """Folder of the shards for these token ids and settings; train/trainer.py, `_precompute_ref_logps`, lists them:
    weights, configuration, dtype and precision, attention and its kernel, packing, compilation, truncation."""
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
        batch_tokens: computed at once, and at least one pair; see `agree_on_batch`.
    """

    def __init__(self, folder: Path, lengths: np.ndarray, batch_tokens: int = 0):
        self.folder, self.lengths, self.batch_tokens = folder, lengths, batch_tokens
        order = np.argsort(-lengths, kind="stable")
        size = max(1, min(SHARD_PAIRS, math.ceil(len(order) / 64)))
        self.shards = [order[i : i + size] for i in range(0, len(order), size)]
        self.computed = 0  # shards, by this process
        self._leases: dict[str, Lease] = {}  # held or waited for, by the name of what is computed

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06}.safetensors"

    def missing_shards(self) -> list[int]:
        return [number for number in range(len(self.shards)) if not self.is_done(number)]

    def is_done(self, number: int) -> bool:
        return read_shard(self.path(number), self.shards[number]) is not None

    def count(self) -> int:
        """Shards that are there, whole or not."""
        return sum(self.path(n).exists() for n in range(len(self.shards)))

    def agree_on_batch(self, choose: Callable[[], int]) -> int:
        """Tokens of a batch: what the first job in this folder chose, so that jobs that share it compute alike.
        Raises UserError where its file holds no number of tokens, and DiskFull."""
        path = self.folder / BATCH
        with explain_cache_errors(self.folder, DiskFull):
            while not path.exists():
                if self._take(path.stem):
                    time.sleep(POLL_SECONDS)
                elif not path.exists():  # looked at again, as a shard is
                    write_atomically(path, json.dumps({"batch_tokens": choose()}))
                self._release()
            text = path.read_text()
        if not (match := re.fullmatch(r'{"batch_tokens": ([1-9]\d*)}', text)):
            raise UserError(f"{path}: {text[:80]!r} is no number of tokens; remove the file, and it is chosen again")
        return int(match[1])

    def batches(self, rows: np.ndarray) -> list[np.ndarray]:
        """Splits rows, longest first, into batches of at most `batch_tokens` tokens, padding counted."""
        out, start = [], 0
        while start < len(rows):
            size = max(1, self.batch_tokens // max(1, int(self.lengths[rows[start]])))
            out.append(rows[start : start + size])
            start += size
        return out

    def compute(
        self,
        numbers: list[int],
        forward: Callable[[np.ndarray], torch.Tensor],
        progress: Callable[[int, str], None] = lambda left, holder: None,
        should_stop: Callable[[], bool] = lambda: False,
        rank: int = 0,
        ranks: int = 1,
        gather: Callable[[list], list] = lambda results: results,
        broadcast: Callable[[Any], Any] = lambda value: value,
    ) -> bool:
        """Computes and writes the shards that no other process computes. Returns whether all of `numbers` are done.

        A process computes what it can take a lease of, then waits for what others hold (common/leases.py).

        With several ranks, where each forward needs all of them because the weights are split: rank 0 claims as many
        shards as there are ranks; their batches are dealt in turn, so those of one round are about as long; the last
        round is filled up with its last batch, whose further results nobody reads. Rank 0 writes.

        Args:
            forward: rows of a batch -> [B, 2] sums of log-probs, chosen and rejected.
            progress: told the tokens still to compute, and who has the shards that this process waits for.
            should_stop: asked before each round; must answer the same on all `ranks`.
            gather: a list on each rank -> the lists of all ranks as one.
            broadcast: rank 0's value -> the same on all `ranks`.

        Raises:
            DiskFull: HF_HOME cannot be written; perhaps on one rank alone.
        """
        todo = numbers
        with explain_cache_errors(self.folder, DiskFull):
            while todo and not should_stop():
                mine, todo, holder = broadcast(self._claim(todo, ranks) if rank == 0 else None)
                if not mine:
                    progress(self._count_tokens(todo), holder)
                    time.sleep(POLL_SECONDS if todo else 0)
                work = [(number, rows) for number in mine for rows in self.batches(self.shards[number])]
                parts: dict[int, list[np.ndarray]] = {number: [] for number in mine}
                left = self._count_tokens([*mine, *todo])
                try:
                    for start in range(0, len(work), ranks):
                        if should_stop():
                            return False
                        _, rows = work[min(start + rank, len(work) - 1)]
                        results = gather([forward(rows).float().cpu().numpy()])
                        for (number, rows), logps in zip(work[start : start + ranks], results, strict=False):
                            parts[number].append(logps)
                            left -= int(self.lengths[rows].sum())
                            progress(left, "")
                            if rank == 0 and sum(map(len, parts[number])) == len(self.shards[number]):
                                self._write(number, np.concatenate(parts.pop(number)))
                finally:
                    self._release()
        return not todo

    def _claim(self, todo: list[int], most: int) -> tuple[list[int], list[int], str]:
        """Up to `most` shards that this process has claimed, those still to do besides, and who has the first."""
        mine: list[int] = []
        left: list[int] = []
        first = ""
        for number in todo:
            if len(mine) == most:
                left.append(number)
            elif self.is_done(number):
                continue
            elif holder := self._take(self.path(number).stem):
                left.append(number)
                first = first or holder
            elif not self.is_done(number):  # looked at again: the new file in the folder makes NFS ask the server
                mine.append(number)
        return mine, left, first

    def _take(self, name: str) -> str | None:
        """Takes a lease; returns None, or who has it."""
        lease = self._leases.setdefault(name, Lease(self.folder / f"{name}.lease"))
        return None if lease.take() else describe_owner(lease.path)

    def _release(self) -> None:
        for lease in self._leases.values():
            lease.release()

    def _write(self, number: int, logps: np.ndarray) -> None:
        write_shard(self.path(number), self.shards[number], logps, self._provenance(), this_process())
        self.computed += 1

    def _count_tokens(self, numbers: list[int]) -> int:
        return int(sum(self.lengths[self.shards[number]].sum() for number in numbers))

    def _provenance(self) -> dict[str, Any]:
        """How a shard is computed, beyond what the key covers."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {"batch_tokens": self.batch_tokens, "device": device}

    def read_all(self) -> np.ndarray:
        """[N, 2] log-probs of all rows. Raises UserError where a shard that another rank wrote cannot be read, also
        after the time for which NFS may remember that a file is not there."""
        logps = np.empty((len(self.lengths), 2), dtype=np.float32)
        for number, rows in enumerate(self.shards):
            shard, patience = read_shard(self.path(number), rows), time.monotonic() + NFS_SECONDS
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

        `made` is a list, because several runs may have computed shards of one cache, each with a batch of its own
        shape: in 16 bit such a cache differs from what the run itself would compute, by rounding.
        """
        provenances: list[dict[str, Any]] = []
        for number in range(len(self.shards)):
            with safe_open(self.path(number), "numpy") as file:
                entry = json.loads((file.metadata() or {}).get("made", "{}"))
            if entry not in provenances:
                provenances.append(entry)
        return {"key": self.folder.name, **{name: str(value) for name, value in settings.items()}, "made": provenances}

    def report_progress(
        self, name: str, numbers: list[int], output_dir: str, every: float = 10.0
    ) -> Callable[[int, str], None]:
        """For `compute`: writes how far the pass is into the log and status.json, at most every `every` seconds."""
        total, begin = self._count_tokens(numbers), time.monotonic()
        reported = begin

        def report(left: int, holder: str) -> None:
            nonlocal reported
            done, now = total - left, time.monotonic()
            if now - reported < every and left:
                return
            reported, rate = now, done / max(now - begin, 1e-9)
            line = f"reference, {name}: {done / total:.0%} of {total:,} tokens, {rate:,.0f} tokens/s"
            if holder:
                line += f", waiting for {holder}"
            elif done:
                line += f", ETA {format_clock(int(left / rate))}"
            log.info(line)
            write_status(output_dir, "running", message=line)

        return report


def write_shard(
    path: Path,
    rows: np.ndarray,
    logps: np.ndarray,
    provenance: dict[str, Any] | None = None,
    owner: dict[str, Any] | None = None,
) -> None:
    """Atomic: the file is whole or absent. `logps` is [n, 2] float32; computed by `owner`, how `provenance` says."""
    data: dict[str, np.ndarray] = {
        "rows": np.ascontiguousarray(rows, dtype=np.int64),
        "logps": np.ascontiguousarray(logps, dtype=np.float32),
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    checksum = _checksum(data["rows"], data["logps"])
    metadata = {"checksum": checksum, "made": json.dumps(provenance or {}, sort_keys=True), "by": json.dumps(owner)}
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
