"""Statistics of pair lengths: percentiles, what each max_length keeps and costs, and the recommended max_length.

All of it is arithmetic on `Lengths`, in tokens as training counts them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.lengths import Lengths

# Rows of the table, besides the recommendation and the step below it
CANDIDATES = (256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768)
STEPS = (*range(128, 4096, 128), *range(4096, 2**20 + 1, 1024))  # possible recommendations
PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 100)
NOTHING_LOST = {"flops": 1.1, "max_length": 2}  # the most time and memory, relative to the usual recommendation
FORWARDS = 4  # an epoch: forward and backward of the policy (3 forwards), and one forward of the reference
SIDES = ("total", "prompt", "chosen", "rejected")
# From max_length and max_prompt_length to the trained tokens of each response, [N, 2]
CountTrained = Callable[[int | None, int | None], np.ndarray]


def compute_coverage(
    lengths: Lengths, count: CountTrained, max_length: int, max_prompt_length: int | None, overlong: str
) -> dict[str, Any]:
    """What a max_length keeps of N pairs; docs/lengths.md explains the counts."""
    truncated = lengths.truncate(max_length, max_prompt_length)
    counts = count(max_length, max_prompt_length)
    used = lengths.used(max_length, max_prompt_length, overlong) & (counts.min(axis=1) > 0)
    cut = (truncated.responses < lengths.responses) & (truncated.responses.max(axis=1, keepdims=True) > 0)
    trained = truncated.select(used)
    untruncated = (truncated.prompt == lengths.prompt) & (truncated.responses == lengths.responses).all(axis=1)
    identical = (truncated.chosen == truncated.rejected) & (truncated.common_prefix >= truncated.chosen)
    return {
        "max_length": max_length,
        "untruncated": float(untruncated.mean()),
        "tokens_kept": int(counts[used].sum()) / int(count(None, None).sum()),
        "no_signal": int((identical & used).sum()),
        "dropped": int((~used).sum()),
        "overlong": int((~lengths.fit(max_length, max_prompt_length)).sum()),
        "cut": dict(zip(("chosen", "rejected"), cut.sum(axis=0).tolist(), strict=True)),
        "response_tokens": int(counts[used].sum()),
        "tokens": int(trained.sequences.sum()),
        "sequences": trained.sequences.ravel(),
    }


def list_lengths(grid: Sequence[int], longest: int, limit: int | None) -> list[int]:
    """The values of `grid` up to the first that fits `longest` tokens, ending at the model's `limit` if reached."""
    chosen: list[int] = []
    for length in grid:
        if limit and length >= limit:
            return [*chosen, limit]
        chosen.append(length)
        if length >= longest:
            break
    return chosen


def analyze_lengths(
    lengths: Lengths,
    count: CountTrained,
    forward_flops: Callable[[torch.Tensor, int], int],
    *,
    min_coverage: float,
    min_tokens_kept: float,
    limit: int | None = None,
    max_prompt_length: int | None = None,
    overlong: str = "truncate",
) -> dict[str, Any]:
    """Percentiles, a row for each candidate max_length, the recommendation and the curves of the plot.

    The recommendation is the shortest of STEPS that at least `min_coverage` of the pairs fit, and that keeps at least
    `min_tokens_kept` of the response tokens, or else the longest; but the shortest that all pairs fit, if it is within
    NOTHING_LOST of that. `forward_flops` gives a forward's FLOPs for the sequences' lengths and the number of response
    tokens; `limit` is the model's longest context.
    """
    longest = int(lengths.total.max())
    steps = list_lengths(STEPS, longest, limit)
    suffices = False
    for step in steps:
        best = compute_coverage(lengths, count, step, max_prompt_length, overlong)
        fits = 1 - best["overlong"] / len(lengths)  # max_prompt_length may cut others
        suffices = fits >= min_coverage and best["tokens_kept"] >= min_tokens_kept
        if suffices:
            break
    if not best["tokens"]:
        raise UserError(
            f"model_name_or_path: no prompt leaves room for a response within the model's limit of {limit} tokens; "
            "set max_prompt_length, or use a model with a longer context"
        )
    position = steps.index(best["max_length"])
    shown = {*list_lengths(CANDIDATES, longest, limit), *steps[max(0, position - 1) : position + 1], steps[-1]}
    rows = []
    for max_length in sorted(shown):
        row = compute_coverage(lengths, count, max_length, max_prompt_length, overlong)
        sequences = row.pop("sequences")
        if row["tokens"]:
            row["flops"] = FORWARDS * forward_flops(torch.from_numpy(sequences), row["response_tokens"])
            rows.append(row)
    best = next(row for row in rows if row["max_length"] == best["max_length"])
    wanted = f"cuts at most {1 - min_coverage:.1%} of the pairs and keeps {min_tokens_kept:.1%} of the response tokens"
    reason = f"The shortest that {wanted}"
    if not suffices:
        reason = f"No max_length within the model's limit {wanted}; this is the longest"
    whole = next((row for row in rows if not row["overlong"]), best)
    growth = {name: whole[name] / best[name] for name in NOTHING_LOST}
    if whole is not best and all(growth[name] <= most for name, most in NOTHING_LOST.items()):
        reason = f"It cuts no pair, and takes {growth['flops'] - 1:.1%} more time than {best['max_length']:,}"
        best = whole
    for row in rows:
        row["relative_time"] = row["flops"] / best["flops"]
    cut = best["overlong"] / len(lengths)
    reason += f": {best['max_length']:,} cuts {cut:.1%} and keeps {best['tokens_kept']:.1%}."
    cut_prompts = float((lengths.prompt > (max_prompt_length or longest)).mean())
    if cut_prompts > 1 - min_coverage:
        reason += (
            f" max_prompt_length {max_prompt_length} cuts {cut_prompts:.1%} of the prompts, whatever max_length is."
        )
    prompt_lengths = (max_prompt_length, int(lengths.prompt.max()), best["max_length"] // 2)
    best["max_prompt_length"] = next(n for n in prompt_lengths if n and n < best["max_length"])
    # Ties count one half
    chosen, rejected = count(None, None).T
    longer = np.where(chosen == rejected, 0.5, chosen > rejected)
    return {
        "percentiles": {side: compute_percentiles(getattr(lengths, side)) for side in SIDES},
        "candidates": rows,
        "recommendation": best | {"reason": reason, "limit": limit},
        "length_bias": {"chosen_longer": float(longer.mean())},
        "curves": compute_curves(lengths),
    }


def compute_percentiles(values: np.ndarray) -> dict[str, Any]:
    """The mean, and for each percentile the smallest value that so many percent do not exceed."""
    smallest = np.percentile(values, PERCENTILES, method="inverted_cdf").astype(int).tolist()
    return {"mean": float(values.mean())} | dict(zip(map(str, PERCENTILES), smallest, strict=True))


def compute_curves(lengths: Lengths) -> dict[str, list]:
    """Share of the pairs with at most `length` tokens, for each of SIDES."""
    shortest = max(1, min(int(np.percentile(getattr(lengths, side), 1)) for side in SIDES))
    at = np.unique(np.geomspace(shortest, int(lengths.total.max()), 160).round()).astype(int)
    curves = {"length": at.tolist()}
    for side in SIDES:
        counts = np.searchsorted(np.sort(getattr(lengths, side)), at, side="right")
        curves[side] = (counts / len(lengths)).tolist()
    return curves
