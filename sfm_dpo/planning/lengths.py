"""Statistics of pair lengths: percentiles, what each max_length keeps and costs, and which max_length to choose.

Pure arithmetic on `Lengths`, in tokens as training counts them. `analyze_lengths` returns a plain dict
(docs/lengths.md), which dataset_report.py formats as text, picture and page.
"""

import bisect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.statistics import Z
from sfm_dpo.data.token_lengths import Lengths

# Rows of the tables, beside the recommendation and the candidate below it
CANDIDATES = (2048, 4096, 8192, 12288, 16384, 24576, 32768)
SHORT_CANDIDATES = (256, 512, 1024)  # added where every pair fits into the first of CANDIDATES
# What can be recommended, as max_length and as max_prompt_length
STEPS = (*range(128, 4096, 128), *range(4096, 2**20 + 1, 1024))
PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 100)
BATCH_SIZES = (1, 2, 4, 8)  # pairs per device
MEMORY_BATCH = 4  # pairs per device for which peak tokens are compared
FORWARDS = 4  # an epoch: forward and backward of the policy (3 forwards), and one forward of the reference


def compute_padding(sequences: np.ndarray, global_batch: int) -> dict[str, dict[str, float]]:
    """Share of the computed tokens that is padding, by pairs per device: {"1": {"stock", "grouped"}, "2": ...}.

    stock: random pairs padded to their longest sequence (TRL), the mean over all orders, exactly: the i-th smallest of
    N (from 0) is the longest of a batch of B drawn without replacement with probability C(i, B-1) / C(N, B).
    grouped: transformers' `group_by_length`, one seeded order of one process.

    Args:
        sequences: [N, 2] tokens of the chosen and the rejected sequence.
    """
    n, longest, shares = len(sequences), sequences.max(axis=1), {}
    generator = torch.Generator().manual_seed(0)
    order = get_length_grouped_indices(sequences.sum(axis=1).tolist(), global_batch, generator=generator)
    for size in BATCH_SIZES:
        drawn, starts = np.arange(min(size, n) - 1), np.arange(0, n, size)
        chance = min(size, n) / n * np.prod(np.maximum(np.arange(n)[:, None] - drawn, 0) / (n - 1 - drawn), axis=1)
        computed = {
            "stock": n * (chance * np.sort(longest)).sum(),
            "grouped": (np.maximum.reduceat(longest[order], starts) * np.diff(starts, append=n)).sum(),
        }
        shares[str(size)] = {name: 1 - float(sequences.sum() / (2 * tokens)) for name, tokens in computed.items()}
    return shares


def percentile_interval(values: np.ndarray, q: float) -> tuple[int, int]:
    """95% interval of a population's percentile from a random sample: two order statistics (normal approximation of
    the binomial rank, rounded outwards). Assumes nothing of the distribution."""
    n, share, ranked = len(values), q / 100, np.sort(values)
    half = Z * math.sqrt(n * share * (1 - share))
    low, high = math.floor(n * share - half), math.ceil(n * share + half)
    return int(ranked[max(low - 1, 0)]), int(ranked[min(high, n - 1)])


def compute_coverage(lengths: Lengths, max_length: int, max_prompt_length: int | None) -> dict[str, Any]:
    """What a max_length keeps of N pairs.

    untouched: share of the pairs of which no token is cut; tokens_kept: share of the response tokens; no_signal: pairs
    whose two responses are cut to the same tokens; dropped: pairs whose prompt leaves no room; prompts_cut: pairs
    whose prompt exceeds max_prompt_length; response_tokens and tokens: trained and computed in an epoch.
    """
    cut = lengths.truncate(max_length, max_prompt_length)
    whole = (cut.prompt == lengths.prompt) & (cut.responses == lengths.responses).all(axis=1)
    alike = (cut.chosen == cut.rejected) & (cut.shared >= cut.chosen)
    return {
        "max_length": max_length,
        "max_prompt_length": max_prompt_length,
        "untouched": float(whole.mean()),
        "tokens_kept": int(cut.responses.sum()) / int(lengths.responses.sum()),
        "no_signal": int((alike & cut.trainable).sum()),
        "dropped": int((~cut.trainable).sum()),
        "prompts_cut": 0 if max_prompt_length is None else int((lengths.prompt > max_prompt_length).sum()),
        "response_tokens": int(cut.responses.sum()),
        "tokens": int(cut.sequences[cut.trainable].sum()),
    }


def list_candidates(longest: int, limit: int | None) -> list[int]:
    """Values of max_length to show, up to the model's limit, which is one of them where it is no more than double
    the largest of the rest."""
    lengths = CANDIDATES if longest > CANDIDATES[0] else SHORT_CANDIDATES + CANDIDATES
    if limit is None:
        return list(lengths)
    below = [length for length in lengths if length < limit]
    return [*below, limit] if limit <= 2 * lengths[-1] else below


def choose_max_prompt_length(lengths: Lengths, max_length: int, min_coverage: float) -> int | None:
    """The limit that trains the most response tokens of the pairs whose prompt leaves no room for a response.

    None where every prompt leaves room, or where each limit would cut the prompts of more pairs that are whole
    without it than it saves, or of so many that fewer than `min_coverage` of all pairs stay whole.
    """
    whole = np.sort(lengths.prompt[lengths.total <= max_length])[::-1]
    saved = int((lengths.prompt >= max_length).sum())
    spare = len(whole) - math.ceil(min_coverage * len(lengths))
    allowed = min(saved, spare) if spare >= 0 else saved
    shortest = whole[allowed] if allowed < len(whole) else 1
    steps = [step for step in STEPS if shortest <= step < max_length]
    if not saved or not steps:
        return None
    long = lengths.select(lengths.prompt > steps[0])
    return max(steps, key=lambda step: (int(long.truncate(max_length, step).responses.sum()), step))


def recommend(
    lengths: Lengths, min_coverage: float, min_tokens_kept: float, limit: int | None, max_prompt_length: int | None
) -> tuple[dict[str, Any], int | None, bool]:
    """The shortest max_length of STEPS, or the model's limit, that with its max_prompt_length leaves at least
    `min_coverage` of the pairs untouched and keeps at least `min_tokens_kept` of the response tokens, or else the
    longest.

    Args:
        max_prompt_length: applied where it is below max_length; where None, `choose_max_prompt_length` decides.

    Returns:
        Its row (`compute_coverage`), the candidate below it (None: there is none), and whether it meets both.
    """
    longest = int(lengths.total.max())
    steps = [step for step in STEPS if limit is None or step < limit]
    steps = steps[: bisect.bisect_left(steps, longest) + 1]
    if limit and (not steps or steps[-1] < longest):
        steps.append(limit)
    covered = np.searchsorted(np.sort(lengths.total), steps, side="right") / len(lengths)
    for i, step in enumerate(steps):
        if covered[i] >= min_coverage or step == steps[-1]:
            prompt_limit = max_prompt_length or choose_max_prompt_length(lengths, step, min_coverage)
            row = compute_coverage(lengths, step, prompt_limit if prompt_limit and prompt_limit < step else None)
            meets = row["untouched"] >= min_coverage and row["tokens_kept"] >= min_tokens_kept
            if meets or step == steps[-1]:
                return row, steps[i - 1] if i else None, meets
    raise AssertionError("the last step always returns")


def describe_choice(
    best: dict[str, Any], below: dict[str, Any] | None, meets: bool, min_coverage: float, min_tokens_kept: float
) -> str:
    """Why `best` is recommended, and what `below`, the next shorter candidate, would keep."""

    def describe(row: dict[str, Any]) -> str:
        return f"{row['max_length']:,} leaves {row['untouched']:.1%} and keeps {row['tokens_kept']:.1%}"

    wanted = f"at least {min_coverage:.1%} of the pairs untouched and {min_tokens_kept:.1%} of the response tokens"
    if not meets:
        return f"No max_length within the model's limit leaves {wanted}; the longest, {describe(best)}."
    shorter = f" {describe(below)}, at {below['relative_time']:.2f} times the step time." if below else ""
    return f"The shortest that leaves {wanted}: {describe(best)}.{shorter}"


def compute_length_bias(lengths: Lengths) -> dict[str, float]:
    """How the responses differ in length: share of pairs with the longer chosen (ties count one half), its 95% margin,
    and the means."""
    longer = np.where(lengths.chosen == lengths.rejected, 0.5, lengths.chosen > lengths.rejected)
    return {
        "chosen_longer": float(longer.mean()),
        "margin": Z * float(longer.std()) / math.sqrt(len(longer)),
        "mean_chosen": float(lengths.chosen.mean()),
        "mean_rejected": float(lengths.rejected.mean()),
    }


def analyze_lengths(
    lengths: Lengths,
    *,
    min_coverage: float,
    min_tokens_kept: float,
    limit: int | None = None,
    max_prompt_length: int | None = None,
    global_batch: int = 128,
    sampled: bool = False,
    forward_flops: Callable[[np.ndarray, int], int] | None = None,
) -> dict[str, Any]:
    """Percentiles, a row for each candidate max_length, the recommendation and the curves of the picture.

    A candidate's row is that of `compute_coverage`, with padding (`compute_padding`), FLOPs of an epoch (None without
    `forward_flops`) and peak_tokens: of the longest MEMORY_BATCH pairs, the largest micro-batch padding-free.

    Args:
        limit: the model's longest context.
        max_prompt_length: applied to every candidate above it; where None, each has that of
            `choose_max_prompt_length`.
        sampled: the pairs are a random sample, so percentiles get a 95% interval.
        forward_flops: sequences' lengths, number of response tokens -> FLOPs of a forward (flops.ForwardFlops).

    Raises:
        UserError: every prompt fills the model's limit.
    """
    best, below, meets = recommend(lengths, min_coverage, min_tokens_kept, limit, max_prompt_length)
    table = []
    for length in sorted({*list_candidates(int(lengths.total.max()), limit), best["max_length"], below or 0} - {0}):
        prompt_limit = max_prompt_length or choose_max_prompt_length(lengths, length, min_coverage)
        prompt_limit = prompt_limit if prompt_limit and prompt_limit < length else None
        cut = lengths.truncate(length, prompt_limit)
        cut = cut.select(cut.trainable)
        if not len(cut):
            continue
        flops = forward_flops and FORWARDS * forward_flops(cut.sequences.ravel(), int(cut.responses.sum()))
        costs = {
            "padding": compute_padding(cut.sequences, global_batch),
            "flops": flops,
            "peak_tokens": int(np.sort(cut.sequences.sum(axis=1))[-MEMORY_BATCH:].sum()),
        }
        table.append(compute_coverage(lengths, length, prompt_limit) | costs)
    rows = {row["max_length"]: row for row in table}
    if best["max_length"] not in rows:
        raise UserError(
            f"model_name_or_path: the model's limit of {limit:,} tokens leaves no room for a response: the shortest "
            f"prompt has {int(lengths.prompt.min()):,}; set max_prompt_length, or take a model with a longer context"
        )
    work, chosen = "tokens" if forward_flops is None else "flops", rows[best["max_length"]]
    for row in table:
        row["relative_time"] = row[work] / chosen[work]
        row["relative_memory"] = row["peak_tokens"] / chosen["peak_tokens"]
    reason = describe_choice(best, rows.get(below), meets, min_coverage, min_tokens_kept)
    whole = lengths.total <= best["max_length"]
    best |= {
        "saved": int((lengths.prompt >= best["max_length"]).sum()) - best["dropped"],
        "whole_cut": int((whole & (lengths.prompt > (best["max_prompt_length"] or np.inf))).sum()),
    }
    return {
        "percentiles": {
            name: _percentiles(getattr(lengths, name), sampled) for name in ("total", "prompt", "chosen", "rejected")
        },
        "candidates": table,
        "recommendation": best
        | {"reason": reason, "min_coverage": min_coverage, "min_tokens_kept": min_tokens_kept, "limit": limit},
        "length_bias": compute_length_bias(lengths),
        "curves": _curves(lengths),
    }


def _percentiles(values: np.ndarray, sampled: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"mean": float(values.mean())}
    for q in PERCENTILES:
        out[str(q)] = {"tokens": int(np.percentile(values, q, method="inverted_cdf"))}  # one that occurs
        if sampled and q < 100:  # no interval for the longest: the sample says nothing of what it lacks
            out[str(q)]["interval"] = list(percentile_interval(values, q))
    return out


def _curves(lengths: Lengths, points: int = 160) -> dict[str, Any]:
    """Histograms over bins of equal width in log(tokens), and the share of totals up to a length."""
    end, bins = int(lengths.total.max()), min(48, 8 + int(len(lengths) ** 0.5 / 4))  # few pairs, wide bins
    edges = np.unique(np.geomspace(max(1, int(lengths.prompt.min())), end + 1, bins + 1).round()).astype(int)
    at = np.unique(np.geomspace(max(1, int(lengths.total.min())), end, points).round()).astype(int)
    names = ("prompt", "chosen", "rejected")
    return {
        "edges": edges.tolist(),
        "pairs": {name: np.histogram(getattr(lengths, name), edges)[0].tolist() for name in names},
        "length": at.tolist(),
        "coverage": (np.searchsorted(np.sort(lengths.total), at, side="right") / len(lengths)).tolist(),
    }
