#!/usr/bin/env python
"""How long ranks wait for the slowest, by sampling strategy.

    python bench/balance.py

Columns: FLOPs of the slowest rank over those of the mean one, by model; tokens of the largest micro-batch. `stock` is
transformers' own batch_rebalance.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import numpy as np
import torch
from transformers import AutoConfig
from transformers.trainer_pt_utils import BatchRebalanceSampler

from bench.lengths import MAX_LENGTH, sample_lengths
from sfm_dpo.common.cli import Arguments
from sfm_dpo.common.files import PROJECT
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.sampler import PairSampler
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import meta_model

PAIRS = 20_000
GLOBAL_BATCH = 128
RANKS = 4
PER_DEVICE = 4
MODELS = ("gpt_neox_6.9b", "olmo3_7b")


def micro_batches(strategy: str, lengths: Lengths) -> list[np.ndarray]:
    """The rows of each micro-batch, in the order of ranks."""
    if strategy == "stock":
        tokens = lengths.computed(prefix_sharing=False)
        settings = (tokens.tolist(), GLOBAL_BATCH, RANKS, GLOBAL_BATCH // (RANKS * PER_DEVICE))
        ranks = [BatchRebalanceSampler(*settings, rank=rank) for rank in range(RANKS)]
        return [np.array(rows) for together in zip(*ranks, strict=True) for rows in together]
    sampler = PairSampler(lengths, strategy, GLOBAL_BATCH, PER_DEVICE, 42)
    return list(sampler.micro_batches(sampler.steps(0)).reshape(-1, PER_DEVICE))


def measure(strategy: str, lengths: Lengths) -> list[float]:
    """Slowest rank over mean rank for each of MODELS, and the tokens of the largest micro-batch."""
    batches = micro_batches(strategy, lengths)
    row = []
    for name in MODELS:
        forward = ForwardFlops.of(meta_model(AutoConfig.from_pretrained(PROJECT / "bench/shapes" / name)))
        work = [forward(torch.from_numpy(lengths.sequences[rows].ravel()), 0) for rows in batches]
        together = np.array(work, dtype=float).reshape(-1, RANKS)  # accelerate gives batch i to rank i mod W
        row.append(together.max(axis=1).sum() / together.mean(axis=1).sum())
    return [*row, max(lengths.sequences[rows].sum() for rows in batches)]


def main(argv: list[str]) -> None:
    Arguments(description=__doc__).parse_args(argv)
    limit = MAX_LENGTH["think"]
    lengths = Lengths(**sample_lengths("think", PAIRS)).truncate(limit, limit // 2)
    print(f"{PAIRS:,} pairs, {RANKS} ranks x {PER_DEVICE}, max_length {limit:,}; {', '.join(MODELS)}")
    for strategy in ("random", "stock", "batch_rebalance"):
        neox, olmo, peak = measure(strategy, lengths)
        print(f"{strategy:<18}{neox:8.3f}{olmo:8.3f}{peak:10,}")


if __name__ == "__main__":
    main(sys.argv[1:])
