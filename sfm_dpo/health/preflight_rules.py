"""What do the base model's log-probs say about DPO on these pairs? Figures, rules, verdict.

Pure functions. All thresholds are in RULES, and in docs/health.md with how to read them.
"""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from sfm_dpo.common.statistics import mean_interval, wilson
from sfm_dpo.config_checks import LENGTH_NORMALIZED_LOSSES

HOPELESS = -2.5  # nats per token: a pair with a larger gap than that is one the base model cannot bridge
MOVE = 0.1  # nats per token: each chosen token gains it and each rejected token loses it


class Rule(NamedTuple):
    """`quantity` of the figures is worse the higher it is (`worse` "above") or the lower ("below")."""

    quantity: str
    what: str  # for the reader of docs/health.md
    worse: str
    caution: float | None
    no_go: float | None
    losses: str  # "all", or "sums": only for losses on summed log-probs
    source: str
    remedy: str


_FAILED = "a failed project's three pairs: 1,034 / 38, 1,045 / 18, 623 / 23 nats, per token 5.2 / 0.8"
_SFT = "train on the chosen answers first (SFT), or take a base model that can write them"
RULES = (
    Rule(
        "token_gap",
        "mean log-prob per token of chosen minus rejected, upper end of the 95% interval",
        "below",
        -1.0,
        -2.5,
        "all",
        f"{_FAILED}; its rule: several nats are a capability gap",
        _SFT,
    ),
    Rule(
        "chosen_logp",
        "mean log-prob per token of the chosen answers, upper end of the 95% interval",
        "below",
        -3.0,
        -4.5,
        "all",
        f"{_FAILED}; -3 is a perplexity of 20, -4.5 of 90",
        _SFT,
    ),
    Rule(
        "hopeless_pairs",
        f"share of pairs with a gap below {HOPELESS:g} nats per token, lower end of the 95% interval",
        "above",
        0.1,
        0.5,
        "all",
        "the no-go of token_gap, pair by pair",
        "filter these pairs (the sources below say where they are)",
    ),
    Rule(
        "sum_gap",
        "mean summed log-prob of chosen minus rejected, upper end of the 95% interval; a no-go only where token_gap "
        "is at least a caution, because long answers alone make sums large",
        "below",
        -100.0,
        -500.0,
        "sums",
        "the failed project's rule: under 50 is fine, over 100 reconsider, over 500 will not work",
        "loss_type sigmoid_norm with beta 5, which compares means; or SFT on the chosen answers first",
    ),
    Rule(
        "weight_after_move",
        f"median gradient weight sigmoid(-margin) after a move of {MOVE:g} nats per token",
        "below",
        0.02,
        None,
        "sums",
        "below it the loss is at its floor before a token's probability has changed by a tenth",
        "a lower beta, or loss_type sigmoid_norm with beta 5",
    ),
    Rule(
        "length_ratio",
        "mean length of chosen over rejected, or the other way round where that is larger",
        "above",
        2.0,
        None,
        "sums",
        "on sums length is what DPO learns first (arXiv 2403.19159)",
        "loss_type sigmoid_norm, or pairs of closer lengths",
    ),
    Rule(
        "no_eos",
        "share of whole responses that do not end with EOS (in their last four tokens)",
        "above",
        0.05,
        None,
        "all",
        "a policy that is never shown an end does not learn to stop",
        "check the chat template and eos_token of the tokenizer",
    ),
    Rule(
        "cut",
        "share of responses cut by max_length",
        "above",
        0.25,
        None,
        "all",
        "cut responses have no end; OLMo 3's own lengths cut under 15%",
        "raise max_length",
    ),
    Rule(
        "prompt_trimmed",
        "share of prompts that are no token prefix of prompt + response",
        "above",
        0.05,
        None,
        "all",
        "what the model sees when it answers is then not what it was trained on",
        "check the generation prompt of the chat template",
    ),
    Rule(
        "dropout",
        "modules with dropout above 0",
        "above",
        0.0,
        None,
        "all",
        "policy and reference then differ by noise, and step 0 fails",
        "disable_dropout: true",
    ),
    Rule(
        "rope_layers",
        "kinds of layer whose RoPE scaling is not OLMo 3's: full attention may be YaRN-scaled, sliding never is",
        "above",
        0.0,
        0.0,
        "all",
        "8,192 tokens of context need no scaling, more do; a flat rope_parameters loses YaRN without a word",
        "give config.json rope_parameters by layer type: yarn for full_attention, default for sliding_attention",
    ),
    Rule(
        "packed_difference",
        "largest difference per token between packed and single sequences, over its tolerance (1e-4, 16 bit: 5e-2)",
        "above",
        1.0,
        1.0,
        "all",
        "sequences of one row would see each other",
        "padding_free: false, and report the model",
    ),
)


def pair_figures(
    logps: np.ndarray, lengths: np.ndarray, sources: list[str], loss_type: str, beta: float
) -> dict[str, Any]:
    """What the base model thinks of the pairs.

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
        "weight_by_base": _quantiles(_sigmoid(-scaled)),
        "weight_after_move": _quantiles(_sigmoid(-margin_after)),
        "by_source": _by_source(gap, sum_gap, scaled, sources),
    }


def rule_values(figures: dict[str, Any], traps: dict[str, float]) -> dict[str, float]:
    """The quantities that RULES judges."""
    chosen, rejected = figures["length"]["chosen"], figures["length"]["rejected"]
    return {
        "token_gap": figures["logp_token"]["gap"][2],
        "chosen_logp": figures["logp_token"]["chosen"][2],
        "hopeless_pairs": figures["hopeless"][1],
        "sum_gap": figures["logp_sum"]["gap"][2],
        "weight_after_move": figures["weight_after_move"][1],
        "length_ratio": max(chosen / rejected, rejected / chosen),
    } | traps


def judge(values: dict[str, float], loss_type: str) -> tuple[str, list[dict[str, Any]]]:
    """(verdict, findings): "go", "caution" or "no-go", and what each rule that was broken says."""
    findings: list[dict[str, Any]] = []
    for rule in RULES:
        value = values.get(rule.quantity)
        if value is None or (rule.losses == "sums" and loss_type in LENGTH_NORMALIZED_LOSSES):
            continue
        sign = 1 if rule.worse == "above" else -1
        broken = [
            (level, limit)
            for level, limit in (("no-go", rule.no_go), ("caution", rule.caution))
            if limit is not None and not sign * value <= sign * limit  # NaN breaks every rule
        ]
        if rule.quantity == "sum_gap" and not any(f["rule"] == "token_gap" for f in findings):
            broken = [(level, limit) for level, limit in broken if level == "caution"]
        if broken:
            level, limit = broken[0]
            found = {"rule": rule.quantity, "level": level, "value": value, "limit": limit}
            findings.append(found | {"what": rule.what, "remedy": rule.remedy})
    levels = {finding["level"] for finding in findings}
    return ("no-go" if "no-go" in levels else "caution" if levels else "go"), findings


def _intervals(**values: np.ndarray) -> dict[str, list[float]]:
    return {name: [*mean_interval(column.tolist())] for name, column in values.items()}


def _quantiles(values: np.ndarray) -> list[float]:
    return [float(q) for q in np.quantile(values, [0.05, 0.5, 0.95])]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    return float(np.corrcoef(a, b)[0, 1]) if len(a) > 2 and a.std() > 0 and b.std() > 0 else None


def _by_source(gap, sum_gap, scaled, sources: list[str]) -> list[dict[str, Any]]:
    """Figures of the ten most frequent sources, the widest gap first; empty where there is one source."""
    names = np.array(sources, dtype=object)
    counts = Counter(sources)
    rows = []
    for name, n in counts.most_common(10) if len(counts) > 1 else []:
        of = names == name
        row = {"source": name, "pairs": n, "gap_token": float(gap[of].mean()), "gap_sum": float(sum_gap[of].mean())}
        rows.append(
            row | {"preferred": float((scaled[of] > 0).mean()), "hopeless": float((gap[of] < HOPELESS).mean())}
        )
    return sorted(rows, key=lambda row: row["gap_token"])


def scale(loss_type: str) -> str:
    return "means over tokens" if loss_type in LENGTH_NORMALIZED_LOSSES else "sums over tokens"


def sentence(finding: dict[str, Any]) -> str:
    """One line: the figure, its limit, what to do."""
    return (
        f"{finding['level']}: {finding['rule']} {finding['value']:.3g}, limit {finding['limit']:g} "
        f"({finding['what']}): {finding['remedy']}"
    )
