"""95% confidence intervals of a mean and of a proportion."""

import math
from collections.abc import Sequence

import numpy as np

# Rounding of a log-prob relative to the largest logit: half a unit of roundoff in 16 bit. In fp32, where sums are not
# accumulated in a higher precision, up to 2**-21 was measured (packed against padded, SmolLM2-135M and tiny models)
LOGP_ROUNDING = {"bf16": 2**-9, "no": 2**-20}
TYPICAL_LOGIT = 10.0  # the largest of a token, where it is not measured
ALLOWED = 4  # times what noise explains: the largest difference that is none

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
    # In this order, because max(0.0, nan) is 0.0
    return max((centre - half) / (1 + square), 0.0), min((centre + half) / (1 + square), 1.0)
