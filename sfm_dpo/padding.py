"""How much of a batch is padding? The share of computed tokens that are not real, by how batches are put together."""

import numpy as np


def stock_padding(sequences: np.ndarray, batch_size: int) -> float:
    """Expected share of padding where `batch_size` random pairs are padded to their longest sequence (TRL).

    Args:
        sequences: [N, 2] tokens of the chosen and the rejected sequence.

    The mean over all orders, exactly: the i-th smallest of N (from 0) is the longest of a batch of B drawn without
    replacement with probability C(i, B-1) / C(N, B).
    """
    longest = np.sort(sequences.max(axis=1)).astype(float)
    n = len(longest)
    size = min(batch_size, n)
    weights = np.full(n, size / n)
    for j in range(size - 1):
        weights *= np.maximum(np.arange(n) - j, 0) / (n - 1 - j)
    return 1 - float(sequences.sum() / (2 * n * (weights * longest).sum()))


def grouped_padding(sequences: np.ndarray, batch_size: int, global_batch: int, seed: int = 0) -> float:
    """Share of padding under transformers' `group_by_length`: shuffled, then sorted within 50 global batches.

    One seeded order of one process; sequences as in stock_padding.
    """
    n, cost = len(sequences), sequences.sum(axis=1)
    order = np.random.default_rng(seed).permutation(n)
    chunk = max(1, min(n // (global_batch * 4), 50)) * global_batch
    order = np.concatenate(
        [part[np.argsort(-cost[part], kind="stable")] for part in (order[i : i + chunk] for i in range(0, n, chunk))]
    )
    longest = sequences.max(axis=1)[order]
    computed = sum(
        2 * len(batch) * int(batch.max()) for batch in (longest[i : i + batch_size] for i in range(0, n, batch_size))
    )
    return 1 - int(cost.sum()) / computed
