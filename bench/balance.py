#!/usr/bin/env python
"""How long ranks wait for the slowest: tokens of each rank and micro-batch, by sampling strategy.

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

import sfm_dpo

sfm_dpo.setup()

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from bench.dolci_lengths import draw
from sfm_dpo.data.sampler import PairSampler
from sfm_dpo.data.token_lengths import Lengths


def deal_rounds(
    strategy: str, cost: np.ndarray, ranks: int, per_device: int, global_batch: int, packed: bool
) -> list[list]:
    """For each micro-batch the rows of each rank; `stock`: transformers' own sampler for batch_rebalance."""
    if strategy == "stock":
        accumulation = global_batch // (ranks * per_device)
        samplers = (
            BatchRebalanceSampler(cost.tolist(), global_batch, ranks, accumulation, rank=r) for r in range(ranks)
        )
        return [list(rows) for rows in zip(*samplers, strict=True)]
    sampler = PairSampler(cost, strategy, global_batch, per_device, 42, packed)
    batches = [rows for step in sampler.steps(0) for rows in sampler.micro_batches(step)]
    return [batches[i : i + ranks] for i in range(0, len(batches), ranks)]  # as accelerate deals them to the ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=["think", "instruct"], default="think")
    parser.add_argument("--max_length", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--per_device", type=int, default=4)
    parser.add_argument("--global_batch", type=int, default=128)
    args = parser.parse_args()
    lengths = Lengths(*draw(args.lengths, args.pairs), np.zeros(args.pairs, dtype=np.int64))
    cut = lengths.truncate(args.max_length, args.max_length // 2)
    sides = cut.select(cut.trainable).sequences
    cost, longest = sides.sum(axis=1), sides.max(axis=1)  # the trainer's length column is the first
    print(f"{len(cost):,} pairs, {args.ranks} ranks x {args.per_device}, max_length {args.max_length:,}")
    print(f"{'':<18}{'padding-free':^26}{'padded':^26}")
    print(f"{'':<18}{'slowest':>8}{'work':>7}{'peak':>10} {'slowest':>9}{'work':>7}{'peak':>10}")
    for strategy in ("random", "group_by_length", "batch_rebalance", "stock"):
        dealt = [
            deal_rounds(strategy, cost, args.ranks, args.per_device, args.global_batch, packed)
            for packed in (True, False)
        ]
        name = "... transformers'" if strategy == "stock" else strategy
        real = np.array([[cost[r].sum() for r in ranks] for ranks in dealt[0]])
        padded = np.array([[2 * len(r) * longest[r].max() for r in ranks] for ranks in dealt[1]])
        cells = [
            (work.max(axis=1).sum() / work.mean(axis=1).sum(), work.max(axis=1).sum() / real.mean(axis=1).sum())
            for work in (real, padded)
        ]
        print(
            f"{name:<18}{cells[0][0]:8.3f}{cells[0][1]:7.2f}{real.max():10,} "
            f"{cells[1][0]:9.3f}{cells[1][1]:7.2f}{padded.max():10,}"
        )


if __name__ == "__main__":
    main()
