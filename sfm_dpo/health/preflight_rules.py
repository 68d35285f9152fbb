"""Rules of the preflight: figures of the base model's log-probs on the pairs, their limits, and a verdict.

Pure functions. All thresholds are in RULES, and in docs/health.md with how to read them.
"""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from sfm_dpo.common.statistics import mean_interval, wilson
from sfm_dpo.config_checks import LENGTH_NORMALIZED_LOSSES

HOPELESS = -2.5  # nats per token: a pair with a larger gap than that is one the base model cannot bridge
MOVE = 0.1  # nats per token: each chosen token gains it and each rejected token loses it


class PreflightRule(NamedTuple):
    """`quantity` is worse the higher it is (`worse` "above") or the lower ("below") than `limits` by level."""

    quantity: str
    what: str  # for the reader of docs/health.md
    worse: str
    limits: dict[str, float]  # "no-go" before "caution"
    source: str
    remedy: str
    losses: str = "all"  # or "sums": only for losses on summed log-probs


_FAILED = "a failed project's three pairs: 1,034 / 38, 1,045 / 18, 623 / 23 nats, per token 5.2 / 0.8"
_SFT = "train on the chosen answers first (SFT), or take a base model that can write them"
RULES = (
    PreflightRule(
        "token_gap",
        "mean log-prob per token of chosen minus rejected, upper end of the 95% interval",
        "below",
        {"no-go": -2.5, "caution": -1.0},
        f"{_FAILED}; its rule: several nats are a capability gap",
        _SFT,
    ),
    PreflightRule(
        "chosen_logp",
        "mean log-prob per token of the chosen answers, upper end of the 95% interval",
        "below",
        {"no-go": -4.5, "caution": -3.0},
        f"{_FAILED}; -3 is a perplexity of 20, -4.5 of 90",
        _SFT,
    ),
    PreflightRule(
        "hopeless_pairs",
        f"share of pairs with a gap below {HOPELESS:g} nats per token, lower end of the 95% interval",
        "above",
        {"no-go": 0.5, "caution": 0.1},
        "the no-go of token_gap, pair by pair",
        "filter these pairs (the sources below say where they are)",
    ),
    PreflightRule(
        "sum_gap",
        "mean summed log-prob of chosen minus rejected, upper end of the 95% interval; a no-go only where token_gap "
        "is at least a caution, because long answers alone make sums large",
        "below",
        {"no-go": -500.0, "caution": -100.0},
        "the failed project's rule: under 50 is fine, over 100 reconsider, over 500 will not work",
        "loss_type sigmoid_norm with beta 5, which compares means; or SFT on the chosen answers first",
        losses="sums",
    ),
    PreflightRule(
        "weight_after_move",
        f"median gradient weight sigmoid(-margin) after a move of {MOVE:g} nats per token",
        "below",
        {"caution": 0.02},
        "below it the loss is at its floor before a token's probability has changed by a tenth",
        "a lower beta, or loss_type sigmoid_norm with beta 5",
        losses="sums",
    ),
    PreflightRule(
        "length_ratio",
        "mean length of chosen over rejected, or the other way round where that is larger",
        "above",
        {"caution": 2.0},
        "on sums length is what DPO learns first (arXiv 2403.19159)",
        "loss_type sigmoid_norm, or pairs of closer lengths",
        losses="sums",
    ),
    PreflightRule(
        "no_eos",
        "share of whole responses that do not end with EOS (in their last four tokens)",
        "above",
        {"caution": 0.05},
        "a policy that is never shown an end does not learn to stop",
        "check the chat template and eos_token of the tokenizer",
    ),
    PreflightRule(
        "cut",
        "share of responses cut by max_length",
        "above",
        {"caution": 0.25},
        "cut responses have no end; OLMo 3's own lengths cut under 15%",
        "raise max_length",
    ),
    PreflightRule(
        "prompt_trimmed",
        "share of prompts that are no token prefix of prompt + response",
        "above",
        {"caution": 0.05},
        "what the model sees when it answers is then not what it was trained on",
        "check the generation prompt of the chat template",
    ),
    PreflightRule(
        "dropout",
        "modules with dropout above 0",
        "above",
        {"caution": 0.0},
        "policy and reference then differ by noise, and step 0 fails",
        "disable_dropout: true",
    ),
    PreflightRule(
        "rope_layers",
        "kinds of layer whose RoPE scaling is not OLMo 3's: full attention may be YaRN-scaled, sliding never is",
        "above",
        {"no-go": 0.0, "caution": 0.0},
        "8,192 tokens of context need no scaling, more do; a flat rope_parameters loses YaRN without a word",
        "give config.json rope_parameters by layer type: yarn for full_attention, default for sliding_attention",
    ),
    PreflightRule(
        "packed_difference",
        "largest difference per token between packed and single sequences, over its tolerance (1e-4, 16 bit: 5e-2)",
        "above",
        {"no-go": 1.0, "caution": 1.0},
        "sequences of one row would see each other",
        "padding_free: false, and report the model",
    ),
)


def compute_pair_figures(
    logps: np.ndarray, lengths: np.ndarray, sources: list[str], loss_type: str, beta: float
) -> dict[str, Any]:
    """Figures of the base model's log-probs on the pairs.

    Args:
        logps: [N, 2] sums of log-probs (nats) of the chosen and rejected responses.
        lengths: [N, 2] tokens of the responses.
        sources: [N].

    Returns:
        Nested figures: means with 95% intervals [mean, low, high], quantiles [5%, 50%, 95%], shares.
    """
    token = logps / lengths
    gap, sum_gap = token[:, 0] - token[:, 1], logps[:, 0] - logps[:, 1]
    normalized = loss_type in LENGTH_NORMALIZED_LOSSES
    scaled = beta * (gap if normalized else sum_gap)
    margin_after = beta * MOVE * (np.full(len(gap), 2.0) if normalized else lengths.sum(axis=1))
    preferred = float(np.mean((scaled > 0) + 0.5 * (scaled == 0)))
    hopeless = float(np.mean(gap < HOPELESS))
    difference = lengths[:, 0] - lengths[:, 1]
    return {
        "pairs": len(gap),
        "logp_sum": _intervals(chosen=logps[:, 0], rejected=logps[:, 1], gap=sum_gap),
        "logp_token": _intervals(chosen=token[:, 0], rejected=token[:, 1], gap=gap),
        "perplexity": {side: float(np.exp(-token[:, i].mean())) for i, side in enumerate(("chosen", "rejected"))},
        "preferred": [preferred, *wilson(preferred, len(gap))],
        "hopeless": [hopeless, *wilson(hopeless, len(gap))],
        "length": {"chosen": float(lengths[:, 0].mean()), "rejected": float(lengths[:, 1].mean())},
        "correlation_gap_length": _correlation(scaled, difference),
        "weight_by_base": _weight_quantiles(scaled),
        "weight_after_move": _weight_quantiles(margin_after),
        "by_source": _figures_by_source(gap, sum_gap, scaled, sources),
    }


def compute_figure_values(figures: dict[str, Any]) -> dict[str, float]:
    """The quantities of RULES that come from the figures; preflight.py has those of tokens and model."""
    chosen, rejected = figures["length"]["chosen"], figures["length"]["rejected"]
    return {
        "token_gap": figures["logp_token"]["gap"][2],
        "chosen_logp": figures["logp_token"]["chosen"][2],
        "hopeless_pairs": figures["hopeless"][1],
        "sum_gap": figures["logp_sum"]["gap"][2],
        "weight_after_move": figures["weight_after_move"][1],
        "length_ratio": max(chosen / rejected, rejected / chosen),
    }


def judge_base_model(values: dict[str, float], loss_type: str) -> tuple[str, list[dict[str, Any]]]:
    """(verdict, findings): "go", "caution" or "no-go", and a finding for each rule that `values` break."""
    findings: list[dict[str, Any]] = []
    for rule in RULES:
        value = values.get(rule.quantity)
        if value is None or (rule.losses == "sums" and loss_type in LENGTH_NORMALIZED_LOSSES):
            continue
        limits = dict(rule.limits)
        if rule.quantity == "sum_gap" and not any(f["rule"] == "token_gap" for f in findings):
            del limits["no-go"]
        sign = 1 if rule.worse == "above" else -1
        for level, limit in limits.items():
            if not sign * value <= sign * limit:  # NaN breaks every rule
                finding = {"rule": rule.quantity, "level": level, "value": value, "limit": limit}
                findings.append(finding | {"what": rule.what, "remedy": rule.remedy})
                break
    levels = {finding["level"] for finding in findings}
    return ("no-go" if "no-go" in levels else "caution" if levels else "go"), findings


def format_finding(finding: dict[str, Any]) -> str:
    """One line: the figure, its limit, what to do."""
    return (
        f"{finding['level']}: {finding['rule']} {finding['value']:.3g}, limit {finding['limit']:g} "
        f"({finding['what']}): {finding['remedy']}"
    )


def _intervals(**values: np.ndarray) -> dict[str, list[float]]:
    return {name: [*mean_interval(column.tolist())] for name, column in values.items()}


def _weight_quantiles(margins: np.ndarray) -> list[float]:
    """5%, 50% and 95% of DPO's gradient weight sigmoid(-margin)."""
    return np.quantile(np.exp(-np.logaddexp(0, margins)), [0.05, 0.5, 0.95]).tolist()


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    return float(np.corrcoef(a, b)[0, 1]) if len(a) > 2 and a.std() > 0 and b.std() > 0 else None


def _figures_by_source(gap, sum_gap, scaled, sources: list[str]) -> list[dict[str, Any]]:
    """Figures of the ten most frequent sources, the widest gap first; empty where there is one source."""
    names, counts = np.array(sources, dtype=object), Counter(sources)
    rows = [
        {
            "source": name,
            "pairs": n,
            "gap_token": float(gap[names == name].mean()),
            "gap_sum": float(sum_gap[names == name].mean()),
            "preferred": float((scaled[names == name] > 0).mean()),
            "hopeless": float((gap[names == name] < HOPELESS).mean()),
        }
        for name, n in (counts.most_common(10) if len(counts) > 1 else ())
    ]
    return sorted(rows, key=lambda row: row["gap_token"])
