"""Order of the pairs: which pairs an optimizer step holds, and how they are assigned to micro-batches of equal count.

What a step holds depends on seed, epoch, data and global batch alone, never on ranks or pairs per device. Accelerate
gives consecutive batches of a plain index sampler to the ranks in turn.
"""

import hashlib
import heapq
import math
from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.data.tokenization import Lengths
from sfm_dpo.model.memory import MicroBatch

# In every checkpoint, which resumes only in the same order: raise it when the same seed and data give another one
ORDER_VERSION = 2
FIRST_STEPS_FOR = (1, 2, 4, 8, 16)  # pairs in a micro-batch


def assign_pairs(tokens: np.ndarray, size: int) -> list[np.ndarray]:
    """Assigns pairs of `tokens` [n] to n / size micro-batches: the longest first, each to the lightest that has room.
    Returns their positions [size] each, the heaviest first: ranks that wait for each other get neighbours."""
    with_room: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(len(tokens) // size)]
    full = []
    for position in np.argsort(-tokens, kind="stable").tolist():
        weight, number, positions = heapq.heappop(with_room)
        positions.append(position)
        micro_batch = (weight + int(tokens[position]), number, positions)
        if len(positions) < size:
            heapq.heappush(with_room, micro_batch)
        else:
            full.append(micro_batch)
    full.sort(key=lambda micro_batch: (-micro_batch[0], micro_batch[1]))
    return [np.array(positions) for _, _, positions in full]


class PairSampler(Sampler[int]):
    """Rows of the training set for one epoch: `micro_batch` consecutive rows are one micro-batch.

    Pairs that do not fill the last global batch are left out of the epoch, another random few each time. The steps
    that hold the largest micro-batch, for any usual number of pairs in it, come first in the first epoch: what fits
    into memory then fits for the whole run.

    `tokens`: [N], both sequences of each pair together; `strategy`: random; batch_rebalance, the same steps, within
    which `assign_pairs` makes the micro-batches; group_by_length, sorted within 50 global batches; or sequential;
    `global_batch`: pairs in a step over all ranks; `packed`: without padding, else pairs of one length come together.
    """

    def __init__(
        self, tokens: np.ndarray, strategy: str, global_batch: int, micro_batch: int, seed: int, packed: bool = True
    ):
        if len(tokens) < global_batch:
            raise UserError(
                f"global_batch_size {global_batch}: there are only {len(tokens)} pairs to train on, less than one "
                "optimizer step; use a smaller global_batch_size, or more data"
            )
        self.tokens = tokens
        self.strategy = strategy
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.seed = seed
        self.packed = packed
        self.epoch = 0
        self.is_over = False  # nothing is left to train
        self._steps: dict[int, list[np.ndarray]] = {}  # of the epoch that was asked for last

    @classmethod
    def of(cls, tokens: np.ndarray, args: TrainConfig) -> "PairSampler":
        """The sampler of a run."""
        strategy = args.train_sampling_strategy
        seed = args.seed if args.data_seed is None else args.data_seed
        return cls(tokens, strategy, args.global_batch_size, args.per_device_train_batch_size, seed, args.padding_free)

    def __len__(self) -> int:
        return len(self.tokens) // self.global_batch * self.global_batch

    def __iter__(self) -> Iterator[int]:
        for rows in [] if self.is_over else self.steps(self.epoch):
            for micro_batch in self.micro_batches(rows):
                yield from micro_batch.tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def steps(self, epoch: int) -> list[np.ndarray]:
        """The rows [global_batch] of each optimizer step of an epoch."""
        if epoch not in self._steps:
            self._steps = {epoch: self._order_steps(epoch)}
        return self._steps[epoch]

    def _order_steps(self, epoch: int) -> list[np.ndarray]:
        if self.strategy == "sequential":
            return np.split(np.arange(len(self)), len(self) // self.global_batch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.tokens))[: len(self)]
        if self.strategy == "group_by_length":
            window = 50 * self.global_batch  # as transformers' LengthGroupedSampler
            windows = (order[i : i + window] for i in range(0, len(order), window))
            order = np.concatenate([rows[np.argsort(-self.tokens[rows], kind="stable")] for rows in windows])
        steps = np.split(order, len(order) // self.global_batch)
        if epoch:
            return steps
        # Packed micro-batches of each usual size: the order depends neither on pairs per device nor on padding
        first: list[int] = []
        for size in FIRST_STEPS_FOR:
            if self.global_batch % size == 0:
                largest = [self.largest(rows, size) for rows in steps]
                first.append(int(np.argmax(largest)))
        rest = [rows for i, rows in enumerate(steps) if i not in first]
        return [steps[i] for i in dict.fromkeys(first)] + rest

    def micro_batches(self, rows: np.ndarray, size: int | None = None) -> list[np.ndarray]:
        """The rows [size, by default micro_batch] of each micro-batch of an optimizer step, in the order of ranks."""
        return self._split(rows, size or self.micro_batch, self.packed)

    def _split(self, rows: np.ndarray, size: int, packed: bool = True) -> list[np.ndarray]:
        if self.strategy == "batch_rebalance" and packed:
            return [rows[positions] for positions in assign_pairs(self.tokens[rows], size)]
        if self.strategy == "batch_rebalance":  # pairs of one length share less padding
            rows = rows[np.argsort(-self.tokens[rows], kind="stable")]
        return np.split(rows, len(rows) // size)

    def largest(self, rows: np.ndarray, size: int) -> int:
        """Tokens of the largest of a step's packed micro-batches of `size` pairs."""
        return max(int(self.tokens[micro_batch].sum()) for micro_batch in self._split(rows, size))

    def largest_micro_batch(self, size: int, epochs: int = 1) -> np.ndarray:
        """The rows [size] of the packed micro-batch with the most tokens in the first `epochs` epochs."""
        steps = [rows for epoch in range(epochs) for rows in self.steps(epoch)]
        micro_batches = [micro_batch for rows in steps for micro_batch in self._split(rows, size)]
        return max(micro_batches, key=lambda rows: int(self.tokens[rows].sum()))

    def imbalance(self, size: int, ranks: int, longest: np.ndarray | None = None) -> float:
        """Tokens of the slowest rank over those of the mean one, if all wait for each other after each micro-batch of
        `size` pairs; over at most 100 steps of the first epoch. `longest`: [N] tokens of the longer sequence of each
        pair, to which a micro-batch is padded; None: packed."""
        steps = self.steps(0)
        computed = []
        for rows in steps[:: math.ceil(len(steps) / 100)]:
            for micro_batch in self.micro_batches(rows, size):
                padded = None if longest is None else 2 * size * int(longest[micro_batch].max())
                computed.append(padded or int(self.tokens[micro_batch].sum()))
        together = np.array(computed).reshape(-1, ranks)
        return float(together.max(axis=1).sum() / together.mean(axis=1).sum())

    def fingerprint(self, epoch: int) -> str:
        """Hash of the rows of each step, sorted: which rank and micro-batch a pair falls into changes no gradient."""
        digest = hashlib.sha256()
        for rows in self.steps(epoch):
            digest.update(np.sort(rows).astype(np.int64).tobytes())
        return digest.hexdigest()[:24]


def list_micro_batches(config: Config, lengths: Lengths, prefix_sharing: bool, ranks: int) -> list[MicroBatch]:
    """The largest micro-batch of a run, which has to fit into memory, for each usual number of pairs per device and
    the one that the configuration names, where the global batch allows it. `lengths` are truncated."""
    args = config.train
    tokens = lengths.computed(prefix_sharing)
    sampler = PairSampler.of(tokens, args)
    micro_batches = []
    for size in sorted({*FIRST_STEPS_FOR, config.micro_batch}):
        if args.global_batch_size % (size * ranks):
            continue
        rows = sampler.largest_micro_batch(size, math.ceil(args.num_train_epochs))
        largest = int(tokens[rows].sum())
        if not args.padding_free:
            largest = 2 * size * int(lengths.total.max())
        responses = int(lengths.responses[rows].sum())
        waiting = sampler.imbalance(size, ranks, None if args.padding_free else lengths.total)
        micro_batches.append(MicroBatch(size, largest, responses, waiting))
    return micro_batches
