"""Rules of the preflight: metrics of the base model's log-probs on the pairs, their limits, and a verdict.

Pure functions. All thresholds are in RULES; docs/health.md says how to read them.
"""

from typing import Any, NamedTuple

import numpy as np

from sfm_dpo.common.statistics import mean_interval, wilson
from sfm_dpo.config.checks import LENGTH_NORMALIZED_LOSSES

UNLEARNABLE = -2.5  # nats per token: the base model cannot bridge a larger gap than this

Figure = tuple[float, float, float]  # a value, and the ends of its 95% interval


class PreflightRule(NamedTuple):
    """The metric `figure` breaks the rule if it is `worse` ("above" or "below") than a limit."""

    figure: str
    worse: str
    caution: float | None
    no_go: float | None
    what: str
    remedy: str


_SFT = "train on the chosen answers first (SFT), or use a base model that can write them"
_MEANS = "loss_type sigmoid_norm with beta 5, which compares means; or SFT on the chosen answers first"
_EOS = "check the chat template and eos_token of the tokenizer"
_UNSEEN = "change the rows, the chat template or max_prompt_length"
_ROPE = "give config.json rope_parameters by layer type: yarn for full_attention, default for sliding_attention"
RULES = (
    PreflightRule("token_gap", "below", -1.0, -2.5, "mean log-prob per token, chosen minus rejected", _SFT),
    PreflightRule("chosen_logp", "below", -3.0, -4.5, "mean log-prob per token of chosen answers", _SFT),
    PreflightRule(
        "unlearnable_pairs", "above", 0.1, 0.5, f"share below {UNLEARNABLE:g} nats per token", "filter these pairs"
    ),
    PreflightRule("sum_gap", "below", -100.0, -500.0, "mean summed log-prob, chosen minus rejected", _MEANS),
    PreflightRule("no_eos", "above", 0.05, None, "share of untruncated responses that do not end with EOS", _EOS),
    PreflightRule("cut", "above", 0.25, None, "share of responses cut by max_length", "raise max_length"),
    PreflightRule("ignored", "above", 0.01, None, "share of pairs with parts that training does not see", _UNSEEN),
    PreflightRule("control_tokens", "above", 0.001, None, "share with special tokens", "filter, unless rendered"),
    PreflightRule("rope_layers", "above", None, 0.0, "kinds of layer with the wrong RoPE scaling", _ROPE),
)


def exact(value: float) -> Figure:
    return value, value, value


def compute_pair_figures(logps: np.ndarray, lengths: np.ndarray) -> dict[str, Figure]:
    """Means and shares with 95% intervals (mean, low, high), in nats.

    `logps`: [N, 2] sums of log-probs (nats) of the chosen and rejected responses under the base model; `lengths`:
    [N, 2] their tokens.
    """
    per_token = logps / lengths
    token_gap = per_token[:, 0] - per_token[:, 1]
    sum_gap = logps[:, 0] - logps[:, 1]
    unlearnable = float((token_gap < UNLEARNABLE).mean())
    return {
        "chosen_logp": mean_interval(per_token[:, 0].tolist()),
        "token_gap": mean_interval(token_gap.tolist()),
        "sum_gap": mean_interval(sum_gap.tolist()),
        "unlearnable_pairs": (unlearnable, *wilson(unlearnable, len(logps))),
    }


def judge_base_model(figures: dict[str, Figure], loss_type: str) -> tuple[str, list[dict[str, Any]]]:
    """(verdict, findings): "go", "caution" or "no-go", and a finding for each rule that `figures` break.

    A metric is judged by the more favourable end of its interval, so all of the interval breaks the rule.
    """
    findings: list[dict[str, Any]] = []
    for rule in RULES:
        if rule.figure not in figures or (rule.figure == "sum_gap" and loss_type in LENGTH_NORMALIZED_LOSSES):
            continue
        limits = {"no-go": rule.no_go, "caution": rule.caution}
        if rule.figure == "sum_gap" and not any(f["rule"] == "token_gap" for f in findings):
            limits["no-go"] = None  # long answers are enough to make sums large
        _, low, high = figures[rule.figure]
        judged = low if rule.worse == "above" else high
        sign = 1 if rule.worse == "above" else -1
        for level, limit in limits.items():
            if limit is not None and not sign * judged <= sign * limit:  # NaN breaks every rule
                finding = {"rule": rule.figure, "level": level, "figure": figures[rule.figure], "limit": limit}
                findings.append(finding | {"what": rule.what, "remedy": rule.remedy})
                break
    levels = {finding["level"] for finding in findings}
    if "no-go" in levels:
        return "no-go", findings
    return ("caution" if levels else "go"), findings


def format_finding(finding: dict[str, Any]) -> str:
    value, low, high = finding["figure"]
    interval = f" (95% interval {low:.3g} to {high:.3g})" if low < high else ""
    sizes = f"{value:.3g}{interval}, limit {finding['limit']:g}"
    return f"{finding['level']}: {finding['rule']} {sizes} ({finding['what']}): {finding['remedy']}"
