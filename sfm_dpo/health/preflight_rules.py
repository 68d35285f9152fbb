"""Rules of the preflight: figures of the base model's log-probs on the pairs, their limits, and a verdict.

Pure functions. All thresholds are in RULES, and in docs/health.md with their sources and how to read them.
"""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from sfm_dpo.common.statistics import mean_interval, wilson
from sfm_dpo.config_checks import LENGTH_NORMALIZED_LOSSES

HOPELESS = -2.5  # nats per token: a pair with a larger gap than that is one the base model cannot bridge
MOVE = 0.1  # nats per token: each chosen token gains it and each rejected token loses it


class PreflightRule(NamedTuple):
    """`quantity` is worse the higher it is (`worse` "above") or the lower ("below") than its limits."""

    quantity: str
    worse: str
    caution: float | None
    no_go: float | None
    what: str
    remedy: str
    sums: bool = False  # only for losses on summed log-probs


_SFT = "train on the chosen answers first (SFT), or take a base model that can write them"
_FILTER = "filter these pairs (the sources below say where they are)"
_MEANS = "loss_type sigmoid_norm with beta 5, which compares means; or SFT on the chosen answers first"
_BETA = "a lower beta, or loss_type sigmoid_norm with beta 5"
_LENGTHS = "loss_type sigmoid_norm, or pairs of closer lengths"
_EOS = "check the chat template and eos_token of the tokenizer"
_PROMPT = "check the generation prompt of the chat template"
_ROPE = "give config.json rope_parameters by layer type: yarn for full_attention, default for sliding_attention"
_PACKED = "padding_free: false, and report the model"
RULES = (  # of a mean or a share the end of its 95% interval that is in doubt's favour
    PreflightRule("token_gap", "below", -1.0, -2.5, "mean log-prob per token, chosen minus rejected", _SFT),
    PreflightRule("chosen_logp", "below", -3.0, -4.5, "mean log-prob per token of the chosen answers", _SFT),
    PreflightRule("hopeless_pairs", "above", 0.1, 0.5, f"share of pairs below {HOPELESS:g} nats per token", _FILTER),
    PreflightRule("sum_gap", "below", -100.0, -500.0, "mean summed log-prob, chosen minus rejected", _MEANS, True),
    PreflightRule("weight_after_move", "below", 0.02, None, f"median after {MOVE:g} nats per token", _BETA, True),
    PreflightRule("length_ratio", "above", 2.0, None, "mean lengths, longer over shorter side", _LENGTHS, True),
    PreflightRule("no_eos", "above", 0.05, None, "share of whole responses that do not end with EOS", _EOS),
    PreflightRule("cut", "above", 0.25, None, "share of responses cut by max_length", "raise max_length"),
    PreflightRule("prompt_trimmed", "above", 0.05, None, "share of prompts that start no prompt + response", _PROMPT),
    PreflightRule("dropout", "above", 0.0, None, "modules with dropout above 0", "disable_dropout: true"),
    PreflightRule("rope_layers", "above", None, 0.0, "kinds of layer whose RoPE scaling is not OLMo 3's", _ROPE),
    PreflightRule("packed_difference", "above", None, 1.0, "packed against single, over its tolerance", _PACKED),
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
    token, sides = logps / lengths, ("chosen", "rejected")
    gap, sum_gap = token[:, 0] - token[:, 1], logps[:, 0] - logps[:, 1]
    normalized = loss_type in LENGTH_NORMALIZED_LOSSES
    scaled = gap if normalized else sum_gap
    margins = beta * MOVE * (np.full(len(gap), 2.0) if normalized else lengths.sum(axis=1))
    preferred = float(np.mean((scaled > 0) + 0.5 * (scaled == 0)))
    hopeless = float(np.mean(gap < HOPELESS))
    longer = lengths[:, 0] - lengths[:, 1]
    varied = len(gap) > 2 and scaled.std() > 0 and longer.std() > 0
    return {
        "pairs": len(gap),
        "logp_sum": _intervals(chosen=logps[:, 0], rejected=logps[:, 1], gap=sum_gap),
        "logp_token": _intervals(chosen=token[:, 0], rejected=token[:, 1], gap=gap),
        "perplexity": dict(zip(sides, np.exp(-token.mean(axis=0)).tolist(), strict=True)),
        "preferred": [preferred, *wilson(preferred, len(gap))],
        "hopeless": [hopeless, *wilson(hopeless, len(gap))],
        "length": dict(zip(sides, lengths.mean(axis=0).tolist(), strict=True)),
        "correlation_gap_length": float(np.corrcoef(scaled, longer)[0, 1]) if varied else None,
        # 5%, 50% and 95% of DPO's gradient weight sigmoid(-margin)
        "weight_after_move": np.quantile(np.exp(-np.logaddexp(0, margins)), [0.05, 0.5, 0.95]).tolist(),
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
        if rule.quantity not in values or (rule.sums and loss_type in LENGTH_NORMALIZED_LOSSES):
            continue
        limits = {"no-go": rule.no_go, "caution": rule.caution}
        if rule.quantity == "sum_gap" and not any(f["rule"] == "token_gap" for f in findings):
            limits["no-go"] = None  # long answers alone make sums large
        value, sign = values[rule.quantity], 1 if rule.worse == "above" else -1
        for level, limit in limits.items():
            if limit is not None and not sign * value <= sign * limit:  # NaN breaks every rule
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
