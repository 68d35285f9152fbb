"""95% confidence intervals of a mean and of a proportion."""

import math
from collections.abc import Sequence

import numpy as np

# Standard deviation of a token's log-prob (nats) between two forwards of different shapes: hidden states and logits
# (of about 10) are rounded, with a relative error of 2**-9 in bf16, 2**-12 in fp16, 2**-24 in fp32
LOGP_NOISE = {"bf16": 0.015, "fp16": 0.002, "no": 1e-5}

Z = 1.959964  # for a two-sided 95% interval under the normal approximation


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95% interval (mean, low, high) by the normal approximation; all NaN if empty."""
    if not len(values):
        return math.nan, math.nan, math.nan
    mean = float(np.mean(values))
    half = Z * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean, mean - half, mean + half


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval (1927) of a share observed in n trials; NaN if the share is NaN."""
    square = Z * Z / n
    centre = share + square / 2
    half = Z * math.sqrt(share * (1 - share) / n + square / (4 * n))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))
