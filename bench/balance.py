#!/usr/bin/env python
"""How long ranks wait for the slowest: tokens of each rank and micro-batch, by sampling strategy.

    python bench/balance.py [--lengths think]

Ranks exchange gradients after each micro-batch (ZeRO-2), so a micro-batch takes what its slowest rank takes. `slowest`
is the sum over micro-batches of the slowest rank's tokens over that of the mean rank: 1.00 is perfect balance. `peak`
is the largest micro-batch.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from bench.lengths import LENGTHS, MAX_LENGTH, sample_lengths
from sfm_dpo.common.cli import Arguments
from sfm_dpo.data.sampler import PairSampler

PAIRS, GLOBAL_BATCH, RANKS, PER_DEVICE = 20_000, 128, 4, 4


def rank_tokens(strategy: str, tokens: np.ndarray) -> np.ndarray:
    """[micro-batches, RANKS] tokens; `stock`: transformers' own sampler for batch_rebalance."""
    if strategy == "stock":
        settings = (tokens.tolist(), GLOBAL_BATCH, RANKS, GLOBAL_BATCH // (RANKS * PER_DEVICE))
        samplers = [BatchRebalanceSampler(*settings, rank=rank) for rank in range(RANKS)]
        return np.array([[tokens[rows].sum() for rows in sampler] for sampler in samplers]).T
    sampler = PairSampler(tokens, strategy, GLOBAL_BATCH, PER_DEVICE, 42)
    batches = [rows for step in sampler.steps(0) for rows in sampler.micro_batches(step)]
    sums = [tokens[rows].sum() for rows in batches]
    return np.array(sums).reshape(-1, RANKS)  # accelerate gives batch i to rank i mod W


def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--lengths", choices=list(LENGTHS), default="think")
    options = parser.parse_args(argv)
    max_length = MAX_LENGTH[options.lengths]
    lengths = sample_lengths(options.lengths, PAIRS)
    prompt = np.minimum(lengths["prompt"], max_length // 2)
    tokens = sum(np.minimum(prompt + lengths[side], max_length) for side in ("chosen", "rejected"))
    print(f"{PAIRS:,} pairs, {RANKS} ranks x {PER_DEVICE}, max_length {max_length:,}")
    print(f"{'':<18}{'slowest':>8}{'peak':>10}")
    for strategy in ("random", "group_by_length", "batch_rebalance", "stock"):
        work = rank_tokens(strategy, tokens)
        slowest = work.max(axis=1).sum() / work.mean(axis=1).sum()
        print(f"{strategy:<18}{slowest:8.3f}{work.max():10,}")


if __name__ == "__main__":
    main(sys.argv[1:])
