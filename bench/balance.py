#!/usr/bin/env python
"""How long do ranks wait for the slowest? Tokens of each rank and micro-batch, by transformers' own samplers.

    python bench/balance.py [--lengths think] [--max_length 8192] [--pairs 20000] [--ranks 4] [--per_device 4]

Ranks exchange gradients after each micro-batch (ZeRO-2), so a micro-batch takes what its slowest rank takes. `slowest`
is the sum over micro-batches of the slowest rank's work over that of the mean rank: 1.00 is perfect balance. `work` is
what all ranks wait for, over the real tokens a rank would have if nobody waited and nothing were padded. Padding-free
a rank's work is its real tokens; padded it is 2 x pairs x its longest sequence. `peak` is the largest micro-batch.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo  # noqa: F401  (first: it looks for the packages)

# isort: split
import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from bench.dolci_lengths import draw
from sfm_dpo.data.token_lengths import Lengths


def micro_batches(
    strategy: str, cost: np.ndarray, ranks: int, per_device: int, global_batch: int, coefficient: float
) -> list[list]:
    """For each micro-batch the rows of each rank. `coefficient`: what attention costs (batch_rebalance)."""
    if strategy == "batch_rebalance":
        accumulation, of_ranks = global_batch // (ranks * per_device), []
        for rank in range(ranks):
            sampler = BatchRebalanceSampler(cost.tolist(), global_batch, ranks, accumulation, rank=rank)
            sampler.QUADRATIC_COST_COEF = coefficient
            of_ranks.append(list(sampler))
        return [list(rows) for rows in zip(*of_ranks, strict=True)]
    generator = torch.Generator().manual_seed(42)
    sampler = (
        RandomSampler(cost, generator=generator)
        if strategy == "random"
        else LengthGroupedSampler(global_batch, lengths=cost.tolist(), generator=generator)
    )
    batches = list(BatchSampler(sampler, per_device, drop_last=True))  # accelerate deals them to the ranks in turn
    return [batches[i : i + ranks] for i in range(0, len(batches) - ranks + 1, ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=["think", "instruct"], default="think")
    parser.add_argument("--max_length", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--per_device", type=int, default=4)
    parser.add_argument("--global_batch", type=int, default=128)
    parser.add_argument("--hidden_size", type=int, default=4096)
    args = parser.parse_args()
    lengths = Lengths(*draw(args.lengths, args.pairs), np.zeros(args.pairs, dtype=np.int64))
    cut = lengths.truncate(args.max_length, args.max_length // 2)
    sides = cut.select(cut.trainable).sequences
    cost, longest = sides.sum(axis=1), sides.max(axis=1)  # the trainer's length column is the first
    print(f"{len(cost):,} pairs, {args.ranks} ranks x {args.per_device}, max_length {args.max_length:,}")
    print(f"{'':<18}{'padding-free':^26}{'padded':^26}")
    print(f"{'':<18}{'slowest':>8}{'work':>7}{'peak':>10} {'slowest':>9}{'work':>7}{'peak':>10}")
    for name in ("random", "group_by_length", "batch_rebalance", "... transformers'"):
        coefficient = 0.001 if name.startswith("...") else 1 / (24 * args.hidden_size)  # trainer.py
        strategy = "batch_rebalance" if name.startswith("...") else name
        rows = micro_batches(strategy, cost, args.ranks, args.per_device, args.global_batch, coefficient)
        real = np.array([[cost[r].sum() for r in ranks] for ranks in rows])
        padded = np.array([[2 * len(r) * longest[r].max() for r in ranks] for ranks in rows])
        cells = [
            (work.max(axis=1).sum() / work.mean(axis=1).sum(), work.max(axis=1).sum() / real.mean(axis=1).sum())
            for work in (real, padded)
        ]
        print(
            f"{name:<18}{cells[0][0]:8.2f}{cells[0][1]:7.2f}{real.max():10,} "
            f"{cells[1][0]:9.2f}{cells[1][1]:7.2f}{padded.max():10,}"
        )


if __name__ == "__main__":
    main()
