"""Statistics of pair lengths: percentiles, what each max_length keeps and costs, and which max_length to choose.

Pure arithmetic on `Lengths`, in tokens as training counts them. `analyze_lengths` returns a plain dict
(docs/lengths.md), which dataset_report.py formats as text, picture and page.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.statistics import Z
from sfm_dpo.data.token_lengths import Lengths

# Rows of the table, beside the recommendation and the step below it
CANDIDATES = (256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768)
# What can be recommended, as max_length and as max_prompt_length
STEPS = (*range(128, 4096, 128), *range(4096, 2**20 + 1, 1024))
PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 100)
FORWARDS = 4  # an epoch: forward and backward of the policy (3 forwards), and one forward of the reference
SIDES = ("total", "prompt", "chosen", "rejected")


def compute_coverage(lengths: Lengths, max_length: int, max_prompt_length: int | None) -> dict[str, Any]:
    """What a max_length keeps of N pairs.

    untouched: share of the pairs of which no token is cut; tokens_kept: share of the response tokens; no_signal: pairs
    whose responses are identical after truncation; dropped: pairs whose prompt leaves no room; prompts_cut: pairs
    whose prompt exceeds max_prompt_length; response_tokens and tokens: trained and computed in an epoch.
    """
    kept = lengths.truncate(max_length, max_prompt_length)
    untouched = (kept.prompt == lengths.prompt) & (kept.responses == lengths.responses).all(axis=1)
    identical = (kept.chosen == kept.rejected) & (kept.shared >= kept.chosen)
    return {
        "max_length": max_length,
        "max_prompt_length": max_prompt_length,
        "untouched": float(untouched.mean()),
        "tokens_kept": int(kept.responses.sum()) / int(lengths.responses.sum()),
        "no_signal": int((identical & kept.trainable).sum()),
        "dropped": int((~kept.trainable).sum()),
        "prompts_cut": 0 if max_prompt_length is None else int((lengths.prompt > max_prompt_length).sum()),
        "response_tokens": int(kept.responses.sum()),
        "tokens": int(kept.sequences[kept.trainable].sum()),
    }


def list_lengths(grid: Sequence[int], longest: int, limit: int | None) -> list[int]:
    """The values of `grid` up to the first that holds `longest` tokens, or up to the model's limit, then the last."""
    chosen: list[int] = []
    for length in grid:
        if limit and length >= limit:
            return [*chosen, limit]
        chosen.append(length)
        if length >= longest:
            break
    return chosen


def choose_max_prompt_length(lengths: Lengths, max_length: int, min_coverage: float) -> int | None:
    """The limit that trains the most response tokens of the pairs whose prompt leaves no room for a response.

    None where every prompt leaves room, or where each limit would cut the prompts of more pairs that fit without it
    than it saves, or of so many that fewer than `min_coverage` of all pairs stay untouched.
    """
    saved = int((lengths.prompt >= max_length).sum())
    if not saved:
        return None
    fitting = np.sort(lengths.prompt[lengths.total <= max_length])[::-1]
    spare = len(fitting) - math.ceil(min_coverage * len(lengths))
    allowed = min(saved, spare) if spare >= 0 else saved
    shortest = fitting[allowed] if allowed < len(fitting) else 1
    steps = [step for step in STEPS if shortest <= step < max_length]
    if not steps:
        return None
    affected = lengths.select(lengths.prompt > steps[0])
    trained = [int(affected.truncate(max_length, step).responses.sum()) for step in steps]
    last_best = max(i for i, tokens in enumerate(trained) if tokens == max(trained))  # cuts the fewest prompts
    return steps[last_best]


def analyze_lengths(
    lengths: Lengths,
    forward_flops: Callable[[np.ndarray, int], int],
    *,
    min_coverage: float,
    min_tokens_kept: float,
    limit: int | None = None,
    max_prompt_length: int | None = None,
) -> dict[str, Any]:
    """Percentiles, a row for each candidate max_length, the recommendation and the curves of the picture.

    A candidate's row is that of `compute_coverage`, with FLOPs of an epoch. Recommended is the shortest of STEPS that
    leaves at least `min_coverage` of the pairs untouched and keeps at least `min_tokens_kept` of the response tokens,
    or else the longest.

    Args:
        forward_flops: sequences' lengths, number of response tokens -> FLOPs of a forward (flops.ForwardFlops).
        limit: the model's longest context.
        max_prompt_length: applied to every candidate above it; where None, each has that of
            `choose_max_prompt_length`.

    Raises:
        UserError: every prompt fills the model's limit.
    """

    def cover(max_length: int) -> dict[str, Any]:
        prompt_limit = max_prompt_length or choose_max_prompt_length(lengths, max_length, min_coverage)
        if prompt_limit and prompt_limit >= max_length:
            prompt_limit = None
        return compute_coverage(lengths, max_length, prompt_limit)

    def suffices(row: dict[str, Any]) -> bool:
        return row["untouched"] >= min_coverage and row["tokens_kept"] >= min_tokens_kept

    longest = int(lengths.total.max())
    steps = list_lengths(STEPS, longest, limit)
    covered = np.searchsorted(np.sort(lengths.total), steps, side="right") / len(lengths)
    first = int(np.searchsorted(covered, min_coverage))  # shorter ones cut too many pairs, whatever the prompts' limit
    best: dict[str, Any] = {}
    for step in steps[min(first, len(steps) - 1) :]:
        best = cover(step)
        if suffices(best):
            break
    position = steps.index(best["max_length"])
    below = steps[position - 1] if position else None
    if not best["tokens"]:
        raise UserError(
            f"model_name_or_path: the model's limit of {limit:,} tokens leaves no room for a response: the shortest "
            f"prompt has {int(lengths.prompt.min()):,}; set max_prompt_length, or take a model with a longer context"
        )
    shown = {*list_lengths(CANDIDATES, longest, limit), best["max_length"], below or best["max_length"]}
    table = [cover(length) for length in sorted(shown)]
    rows = {row["max_length"]: row for row in table if row["tokens"]}
    for row in rows.values():
        kept = lengths.truncate(row["max_length"], row["max_prompt_length"])
        kept = kept.select(kept.trainable)
        row["flops"] = FORWARDS * forward_flops(kept.sequences.ravel(), row["response_tokens"])
    for row in rows.values():
        row["relative_time"] = row["flops"] / rows[best["max_length"]]["flops"]
    best |= {
        "saved": int((lengths.prompt >= best["max_length"]).sum()) - best["dropped"],
        "reason": describe_choice(best, rows.get(below), suffices(best), min_coverage, min_tokens_kept),
        "min_coverage": min_coverage,
        "min_tokens_kept": min_tokens_kept,
        "limit": limit,
    }
    return {
        "percentiles": {side: compute_percentiles(getattr(lengths, side)) for side in SIDES},
        "candidates": list(rows.values()),
        "recommendation": best,
        "length_bias": compute_length_bias(lengths),
        "curves": compute_curves(lengths),
    }


def describe_choice(
    best: dict[str, Any], below: dict[str, Any] | None, suffices: bool, min_coverage: float, min_tokens_kept: float
) -> str:
    """Why `best` is recommended, and what `below`, the next shorter step, would keep."""

    def describe(row: dict[str, Any]) -> str:
        return f"{row['max_length']:,} leaves {row['untouched']:.1%} and keeps {row['tokens_kept']:.1%}"

    wanted = f"at least {min_coverage:.1%} of the pairs untouched and {min_tokens_kept:.1%} of the response tokens"
    if not suffices:
        return f"No max_length within the model's limit leaves {wanted}; the longest, {describe(best)}."
    shorter = f" {describe(below)}, at {below['relative_time']:.2f} times the step time." if below else ""
    return f"The shortest that leaves {wanted}: {describe(best)}.{shorter}"


def compute_percentiles(values: np.ndarray) -> dict[str, Any]:
    """The mean, and by percentile the smallest value that so many percent do not exceed."""
    percentiles: dict[str, Any] = {"mean": float(values.mean())}
    for q in PERCENTILES:
        percentiles[str(q)] = {"tokens": int(np.percentile(values, q, method="inverted_cdf"))}
    return percentiles


def compute_length_bias(lengths: Lengths) -> dict[str, float]:
    """Share of pairs with the longer chosen response (ties count one half), and its 95% margin."""
    longer = np.where(lengths.chosen == lengths.rejected, 0.5, lengths.chosen > lengths.rejected)
    return {"chosen_longer": float(longer.mean()), "margin": Z * float(longer.std()) / math.sqrt(len(longer))}


def compute_curves(lengths: Lengths, points: int = 160) -> dict[str, list]:
    """Share of the pairs with at most so many tokens (`length`), for each of SIDES."""
    shortest = max(1, int(np.percentile(lengths.prompt, 1)))
    at = np.unique(np.geomspace(shortest, int(lengths.total.max()), points).round()).astype(int)
    curves = {"length": at.tolist()}
    for side in SIDES:
        counts = np.searchsorted(np.sort(getattr(lengths, side)), at, side="right")
        curves[side] = (counts / len(lengths)).tolist()
    return curves
