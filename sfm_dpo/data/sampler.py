"""Order of the pairs: which pairs form an optimizer step, and how they are assigned to micro-batches of equal count.

The pairs of a step, and the order of the steps, depend only on seed, data and global batch, never on ranks, pairs per
device or a speed flag. Accelerate gives consecutive batches of a plain index sampler to the ranks in turn, so the
sampler emits a step's micro-batches in that order. Each epoch's fingerprint goes into every checkpoint: a run resumes
only if the order is the same.
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import TrainConfig
from sfm_dpo.data.lengths import Lengths

FIRST_STEPS_FOR = (1, 2, 4, 8, 16)  # pairs in a micro-batch
HIDDEN = 4096  # hidden size of a 7B model


def assign_pairs(cost: np.ndarray, size: int) -> np.ndarray:
    """Assigns the n pairs of each step, of `cost` [S, n], to micro-batches of `size`, a divisor of n: the costliest
    pair first, each to the cheapest micro-batch with room. Returns positions [S, n / size, size], the costliest
    micro-batch first: ranks that wait for each other get micro-batches of similar cost."""
    steps, pairs = cost.shape
    positions = np.empty((steps, pairs // size, size), dtype=int)
    filled = np.zeros(positions.shape[:2], dtype=int)
    totals = np.zeros(positions.shape[:2])
    each = np.arange(steps)
    for position in np.argsort(-cost, axis=1, kind="stable").T:
        cheapest = np.where(filled < size, totals, np.inf).argmin(axis=1)
        positions[each, cheapest, filled[each, cheapest]] = position
        filled[each, cheapest] += 1
        totals[each, cheapest] += cost[each, position]
    costliest_first = np.argsort(-totals, axis=1, kind="stable")
    return np.take_along_axis(positions, costliest_first[..., None], axis=1)


@dataclass(frozen=True)
class Layout:
    """Tokens and cost of each pair in a run: padded, packed, or packed with prefix sharing."""

    tokens: np.ndarray  # [N], of both sequences of a pair; a shared prompt counts once
    longest: np.ndarray | None  # [N], of the longer sequence, to which a micro-batch is padded; None: packed
    cost: np.ndarray  # [N], work in tokens: a layer of hidden size h takes 24 h^2 FLOPs a token, 4 h a (query, key)

    @classmethod
    def of(cls, lengths: Lengths, packed: bool, shared: bool) -> "Layout":
        squares = (lengths.sequences.astype(float) ** 2).sum(axis=1)
        if shared:
            squares -= lengths.prompt.astype(float) ** 2
        tokens = lengths.computed(shared)
        return cls(tokens, None if packed else lengths.total, tokens + squares / 2 / (6 * HIDDEN))

    def count(self, rows: np.ndarray) -> np.ndarray:
        """Tokens that each micro-batch of `rows` [..., size] computes, including padding."""
        if self.longest is None:
            return self.tokens[rows].sum(axis=-1)
        return 2 * rows.shape[-1] * self.longest[rows].max(axis=-1)

    def split(self, steps: np.ndarray, size: int, balanced: bool) -> np.ndarray:
        """The rows [S, n / size, size] of the micro-batches of `steps` [S, n]; balanced: of equal cost or, if padded,
        of pairs of similar length."""
        shape = len(steps), -1, size
        if not balanced:
            return steps.reshape(shape)
        if self.longest is None:
            order = assign_pairs(self.cost[steps], size).reshape(steps.shape)
        else:
            order = np.argsort(-self.longest[steps], axis=1, kind="stable")
        return np.take_along_axis(steps, order, axis=1).reshape(shape)


@dataclass(eq=False)  # hashed by identity
class PairSampler(Sampler[int]):
    """Rows of the training set for one epoch: `micro_batch` consecutive rows are one micro-batch.

    Pairs that do not fill the last global batch are left out of the epoch; each epoch draws them anew. The steps with
    the largest micro-batch, for any usual number of pairs in it and any Layout, come first in the first epoch, so an
    out-of-memory error appears at once.

    `strategy`, TRL's `train_sampling_strategy`: random; batch_rebalance, the same steps with balanced micro-batches.
    """

    lengths: Lengths  # of the N pairs, truncated
    strategy: str
    global_batch: int  # pairs in an optimizer step over all ranks; a multiple of `micro_batch`
    micro_batch: int
    seed: int
    packed: bool = True  # the run's Layout
    shared: bool = False
    epochs: int = 1  # of the run, the last one perhaps in part

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.lengths, self.packed, self.shared)
        self.epoch = 0
        self.is_over = False  # no step is left to train

    @classmethod
    def of(
        cls, lengths: Lengths, args: TrainConfig, micro_batch: int = 1, packed: bool = True, shared: bool = False
    ) -> "PairSampler":
        """The sampler of a run; its steps do not depend on the last three. Raises UserError if there are fewer pairs
        than a global batch."""
        if len(lengths) < args.global_batch_size:
            unit = args.world_size * (args.per_device_train_batch_size or 1)
            size = max(1, len(lengths) // 10 // unit) * unit  # ten steps, if there are as many pairs
            advice = f"({size if size <= len(lengths) else 'fewer pairs per device'})"
            raise UserError(
                f"global_batch_size {args.global_batch_size}: there are only {len(lengths)} pairs to train on, fewer "
                f"than one optimizer step needs; use a smaller global_batch_size {advice}, or more data"
            )
        seed = args.seed if args.data_seed is None else args.data_seed
        sampler = cls(lengths, args.train_sampling_strategy, args.global_batch_size, micro_batch, seed, packed, shared)
        sampler.epochs = math.ceil(args.count_steps(len(lengths)) * args.global_batch_size / len(sampler))
        return sampler

    def __len__(self) -> int:
        return len(self.lengths) // self.global_batch * self.global_batch

    def __iter__(self) -> Iterator[int]:
        if not self.is_over:
            yield from self.micro_batches(self.steps(self.epoch)).ravel().tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @functools.lru_cache(maxsize=1)  # noqa: B019  (ordering takes a second, and the last sampler stays anyway)
    def steps(self, epoch: int) -> np.ndarray:
        """The rows [S, global_batch] of the optimizer steps of an epoch."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.lengths))[: len(self)]
        steps = order.reshape(-1, self.global_batch)
        return self._put_largest_first(steps) if epoch == 0 else steps

    def _put_largest_first(self, steps: np.ndarray) -> np.ndarray:
        """The steps, starting with those that hold the largest micro-batch of each Layout and usual size."""
        first: list[int] = []
        for packed, shared in ((True, True), (True, False), (False, False)):
            layout = Layout.of(self.lengths, packed, shared)
            for size in FIRST_STEPS_FOR:
                if self.global_batch % size == 0:
                    largest = layout.count(self.micro_batches(steps, size, layout)).max(axis=1)
                    first.append(int(largest.argmax()))
        rest = np.delete(steps, first, axis=0)
        return np.concatenate([steps[list(dict.fromkeys(first))], rest])

    def micro_batches(self, steps: np.ndarray, size: int | None = None, layout: Layout | None = None) -> np.ndarray:
        """The rows [S, n, size, by default micro_batch] of the n micro-batches of `steps`, in the order of ranks."""
        return (layout or self.layout).split(steps, size or self.micro_batch, self.strategy == "batch_rebalance")

    def largest_micro_batch(self, size: int) -> np.ndarray:
        """The rows [size] of the micro-batch with the most tokens in all epochs."""
        steps = np.concatenate([self.steps(epoch) for epoch in range(self.epochs)])
        micro_batches = self.micro_batches(steps, size).reshape(-1, size)
        return micro_batches[self.layout.count(micro_batches).argmax()]

    def fingerprint(self, epoch: int) -> str:
        """Hash of the sorted rows of each step: the rank and micro-batch of a pair do not change the gradient."""
        digest = hashlib.sha256()
        for rows in self.steps(epoch):
            digest.update(np.sort(rows).astype(np.int64).tobytes())
        return digest.hexdigest()[:24]


def order_pairs(tokens: Dataset, args: TrainConfig, *layout: Any) -> PairSampler:
    """`PairSampler.of` for the tokenised pairs of a run, truncated as it trains on them."""
    return PairSampler.of(Lengths.of(tokens).truncate(args.max_length), args, *layout)
