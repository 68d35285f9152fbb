"""Lengths of preference pairs in three kinds of data, in tokens under the chat template.

think and instruct are fitted to the published lengths of allenai/Dolci-Think-DPO-7B and allenai/Dolci-Instruct-DPO; a
total is prompt plus longer response. Think: medians and 95th percentiles of prompt, chosen and rejected are exact;
totals: median 2,138 (here 2,158), p90 9,194 (9,696), p95 15,433 (15,068), within 8,192 87.7% (87.3%). Instruct:
totals: median 682 (661), p95 3,521 (3,597). chat is multi-turn, like helpfulness datasets.
"""

import numpy as np
import torch

QUANTILES = (0, 0.25, 0.5, 0.75, 0.87, 0.95, 0.99, 1)
PROMPT = (10, 34, 114, 333, 545, 793, 1700, 6000)
LENGTHS = {  # tokens at QUANTILES, linear in log(tokens) between them
    "think": {
        "prompt": PROMPT,
        "chosen": (60, 700, 1864, 2800, 6000, 11903, 22000, 32000),
        "rejected": (30, 300, 1154, 1600, 4600, 9518, 20000, 32000),
    },
    "instruct": {
        "prompt": PROMPT,
        "chosen": (4, 85, 270, 700, 1270, 2200, 4800, 10000),
        "rejected": (4, 75, 240, 650, 1200, 2100, 4800, 10000),
    },
    "chat": {
        "prompt": (6, 50, 120, 208, 265, 400, 660, 1100),
        "chosen": (1, 12, 28, 57, 81, 130, 215, 420),
        "rejected": (1, 15, 35, 71, 101, 160, 265, 500),
    },
}
CORRELATION = 0.75  # of the normal scores of chosen and rejected length
MAX_LENGTH = {"think": 8192, "instruct": 4096, "chat": 1024}


def sample_lengths(kind: str, n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """[n] tokens each of prompt, chosen and rejected. Sobol points make a small sample represent the full set."""
    points = torch.quasirandom.SobolEngine(3, scramble=True, seed=seed).draw(n, dtype=torch.float64)
    normal = torch.special.ndtri(points.clamp(1e-6, 1 - 1e-6))
    normal[:, 2] = CORRELATION * normal[:, 1] + (1 - CORRELATION**2) ** 0.5 * normal[:, 2]
    order = np.random.default_rng(seed).permutation(n)
    lengths = {}
    for i, (name, tokens) in enumerate(LENGTHS[kind].items()):
        u = torch.special.ndtr(normal[:, i]).numpy()[order]
        lengths[name] = np.exp(np.interp(u, QUANTILES, np.log(tokens))).astype(int)
    return lengths
