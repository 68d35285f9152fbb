"""Which max_length and max_prompt_length suit a dataset: what each max_length keeps and costs, and a recommendation.

All of it is arithmetic on `Lengths`, in tokens as training counts them; docs/data.md states the rule.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.pairs import PARTS

# Rows of the table, besides the recommendation and the shortest acceptable length
CANDIDATES = (256, 512, 1024, 2048, 4096, 8192, 12288, 16384, 24576, 32768)
STEPS = (*range(128, 4096, 128), *range(4096, 2**20 + 1, 1024))  # possible recommendations
PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 100)
NEARLY_ALL = 0.999  # share of untruncated pairs; a longer max_length is not worth its time
MOST_TIME = 1.1  # of a recommendation, relative to the shortest acceptable max_length
FORWARDS = 4  # an epoch: forward and backward of the policy (3 forwards), and one forward of the reference
# From max_length and max_prompt_length to the trained tokens of each response, [N, 2]
CountTrained = Callable[[int | None, int | None], np.ndarray]
# From the lengths of sequences and the number of response tokens to the FLOPs of a forward
CountFlops = Callable[[torch.Tensor, int], int]
Row = dict[str, Any]  # what measure_length returns


def choose_prompt_length(lengths: Lengths, max_length: int) -> int | None:
    """The max_prompt_length that leaves room for a median response, in at most half of `max_length`; None if no prompt
    fills `max_length`: then each pair keeps a part of its responses without it."""
    if lengths.prompt.max() < max_length:
        return None
    room = int(np.median(lengths.responses.max(axis=1)))
    return max_length - min(room, max_length // 2)


def measure_length(
    lengths: Lengths, count: CountTrained, forward_flops: CountFlops, overlong: str, max_length: int
) -> Row:
    """What a max_length, with the max_prompt_length that goes with it, keeps of N pairs, and what an epoch costs."""
    limits = (max_length, choose_prompt_length(lengths, max_length))
    truncated = lengths.truncate(*limits)
    trained = count(*limits)
    reasons = lengths.find_unused(trained, *limits, overlong)
    used = reasons == ""
    untruncated = (truncated.prompt == lengths.prompt) & (truncated.responses == lengths.responses).all(axis=1)
    sequences = truncated.select(used).sequences
    response_tokens = int(trained[used].sum())
    return {
        "max_length": max_length,
        "max_prompt_length": limits[1],
        "untruncated": float(untruncated.mean()),
        "tokens_kept": response_tokens / int(count(None, None).sum()),
        "dropped": int((~used).sum()),
        "equal": int((reasons == "equal_after_cut").sum()),
        "response_tokens": response_tokens,
        "tokens": int(sequences.sum()),
        "flops": FORWARDS * forward_flops(torch.from_numpy(sequences.ravel()), response_tokens),
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


def choose_length(
    measure: Callable[[int], Row], steps: Sequence[int], min_coverage: float, min_tokens_kept: float
) -> tuple[Row | None, Row]:
    """The shortest acceptable of `steps` (None if none is), and the recommended one."""
    rows = map(measure, steps)
    for shortest in rows:
        if shortest["untruncated"] >= min_coverage and shortest["tokens_kept"] >= min_tokens_kept:
            break
    else:
        return None, measure(steps[-1])
    best = shortest
    for row in rows:
        if best["untruncated"] >= NEARLY_ALL or row["flops"] > MOST_TIME * shortest["flops"]:
            break
        if row["untruncated"] > best["untruncated"]:
            best = row
    return shortest, best


def analyze_lengths(
    lengths: Lengths,
    count: CountTrained,
    forward_flops: CountFlops,
    *,
    min_coverage: float,
    min_tokens_kept: float,
    limit: int | None = None,
    overlong: str = "truncate",
) -> dict[str, Any]:
    """Percentiles, a row for each candidate max_length, and the recommendation.

    A max_length is acceptable if it leaves at least `min_coverage` of the pairs untruncated, and keeps at least
    `min_tokens_kept` of the response tokens. `limit` is the model's longest context. Raises UserError if no pair keeps
    a response.
    """
    longest = int(lengths.total.max())
    steps = list_lengths(STEPS, longest, limit)
    measure = functools.cache(functools.partial(measure_length, lengths, count, forward_flops, overlong))
    shortest, best = choose_length(measure, steps, min_coverage, min_tokens_kept)
    if not best["tokens"]:
        raise UserError(
            f"model_name_or_path: no pair keeps a response within the model's limit of {limit} tokens; set overlong: "
            "truncate, or use a model with a longer context"
        )
    shown = {*list_lengths(CANDIDATES, longest, limit), (shortest or best)["max_length"], best["max_length"]}
    measured = [measure(max_length) for max_length in sorted(shown)]
    rows = [row | {"relative_time": row["flops"] / best["flops"]} for row in measured if row["tokens"]]
    wanted = f"cuts at most {1 - min_coverage:.1%} of the pairs and keeps {min_tokens_kept:.1%} of the response tokens"
    # Ties count one half
    chosen, rejected = count(None, None).T
    longer = np.where(chosen == rejected, 0.5, chosen > rejected)
    return {
        "percentiles": {side: compute_percentiles(getattr(lengths, side)) for side in ("total", *PARTS)},
        "candidates": rows,
        "recommendation": best | {"relative_time": 1.0, "reason": explain_choice(lengths, shortest, best, wanted)},
        "length_bias": {"chosen_longer": float(longer.mean())},
    }


def explain_choice(lengths: Lengths, shortest: Row | None, best: Row, wanted: str) -> str:
    """Why choose_length recommends `best`, and what both of its values cut; `wanted`: what is acceptable."""
    if shortest is None:
        reason = f"No max_length within the model's limit {wanted}; this is the longest."
    elif best is shortest:
        reason = f"The shortest that {wanted}."
    else:
        time = best["flops"] / shortest["flops"] - 1
        reason = f"{shortest['max_length']:,} is the shortest that {wanted}; this cuts fewer for {time:.1%} more time."
    cut = round((1 - best["untruncated"]) * len(lengths))
    kept = f"{best['tokens_kept']:.1%} of the response tokens"
    reason += f"\nIt cuts {cut:,} of {len(lengths):,} pairs and keeps {kept}."
    if best["max_prompt_length"]:
        full = np.count_nonzero(lengths.prompt >= best["max_length"])
        reason += f" Without max_prompt_length, {full:,} pairs would be left without a response."
    return reason


def compute_percentiles(values: np.ndarray) -> dict[str, Any]:
    """The mean, and for each percentile the smallest value that so many percent do not exceed."""
    smallest = np.percentile(values, PERCENTILES, method="inverted_cdf").astype(int).tolist()
    return {"mean": float(values.mean())} | dict(zip(map(str, PERCENTILES), smallest, strict=True))
