"""Synthetic preference pairs with the length distributions published for allenai/Dolci-Think-DPO-7B and -Instruct-DPO.

Lengths are tokens under the chat template. What is published is met exactly in expectation: share of pairs whose total
(prompt + longer response) is at most so many tokens, and for Dolci-Think median and 95th percentile of prompt, chosen
and rejected. Between these points lengths are interpolated on a log scale; the rest is assumed (ASSUMED below).
"""

from collections.abc import Iterator

import numpy as np

# Share of pairs whose total is at most so many tokens.
TOTAL = {
    "think": [
        (0.478, 2048),
        (0.5, 2138),
        (0.751, 4096),
        (0.877, 8192),
        (0.9, 9194),
        (0.928, 12288),
        (0.95, 15433),
        (0.958, 16384),
        (0.99, 24834),
    ],
    "instruct": [(0.5, 682), (0.95, 3521), (0.962, 4096)],
}
# Median and 95th percentile.
PROMPT = {"think": (114, 793), "instruct": (114, 793)}  # ASSUMED for instruct: as think
CHOSEN = {"think": (1864, 11903)}
REJECTED = {"think": (1154, 9518)}
ENDS = {"think": (150, 32000), "instruct": (60, 10000)}  # ASSUMED: shortest and longest total
CHOSEN_IS_LONGER = 0.6  # ASSUMED
SHORTER_RATIO = 0.7  # ASSUMED where no percentiles of the responses are published: shorter response / longer one


def draw(kind: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of prompt, chosen and rejected, each [n] int64; `kind` is think or instruct."""
    rng = np.random.default_rng(seed)
    shares, totals = zip((0.0, ENDS[kind][0]), *TOTAL[kind], (1.0, ENDS[kind][1]), strict=True)
    total = np.exp(np.interp(rng.random(n), shares, np.log(totals))).round().astype(int)
    median, p95 = PROMPT[kind]
    prompt = np.exp(np.log(median) + np.log(p95 / median) / 1.645 * rng.standard_normal(n)).round().astype(int)
    prompt = prompt.clip(min=24)
    for row in np.flatnonzero(prompt > 0.8 * total):  # swapped with a row where both fit, so that no share changes
        fits = (prompt[row] <= 0.8 * total) & (prompt <= 0.8 * total[row])
        if fits.any():
            other = rng.choice(np.flatnonzero(fits))
            prompt[row], prompt[other] = prompt[other], prompt[row]
    longer = np.maximum(total - prompt, 8)
    chosen_longer = rng.random(n) < CHOSEN_IS_LONGER
    chosen, rejected = longer.copy(), longer.copy()
    for side, rows, points in (
        (chosen, ~chosen_longer, CHOSEN.get(kind)),
        (rejected, chosen_longer, REJECTED.get(kind)),
    ):
        side[rows] = np.maximum(4, _shorter(longer, rows, points).round())
    return prompt, chosen, rejected


def _shorter(longer: np.ndarray, rows: np.ndarray, points: tuple[int, int] | None) -> np.ndarray:
    """Lengths of the shorter response in `rows` (bool) such that the side as a whole has these two percentiles."""
    if points is None or not rows.any():
        return longer[rows] * SHORTER_RATIO
    weight, ranked = rows.mean(), np.sort(longer)
    # The side is the longer response in the other rows: what is left of the share has to come from these rows.
    share = [
        np.clip((q - (1 - weight) * (ranked <= at).mean()) / weight, 0.01, 0.99)
        for q, at in zip((0.5, 0.95), points, strict=True)
    ]
    ratios = [at / np.quantile(longer[rows], q) for q, at in zip(share, points, strict=True)]
    rank = longer[rows].argsort().argsort() / rows.sum()
    return longer[rows] * np.interp(rank, share, np.minimum(ratios, 0.99))


def rows(
    kind: str, n: int, words: list[str], overhead: tuple[int, int] = (0, 0), divide: int = 1, seed: int = 0
) -> Iterator[dict]:
    """Rows in the shape of Dolci-Think (`prompt` text, responses as message lists) with such lengths over `divide`.

    Args:
        words: each one token (with the space before it); texts are slices of them.
        overhead: tokens that the chat template adds to a prompt and to a response.
    """
    rng = np.random.default_rng(seed + 1)

    def text(tokens: int) -> str:
        start = int(rng.integers(len(words)))
        return " " + " ".join((words[start:] + words * (1 + tokens // len(words)))[: max(1, tokens)])

    for prompt, chosen, rejected in zip(*draw(kind, n, seed), strict=True):
        yield {
            "prompt": text(prompt // divide - overhead[0]),
            "chosen": [{"role": "assistant", "content": text(chosen // divide - overhead[1])}],
            "rejected": [{"role": "assistant", "content": text(rejected // divide - overhead[1])}],
        }
