"""Rules of the guard: the log of a training run in, findings out.

Pure functions, so that a recorded run can be replayed without a model. All thresholds are here and in docs/health.md.
"""

import math
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

from sfm_dpo.common.statistics import mean_interval

COLLAPSE_STEPS = 20  # optimizer steps within which a collapse happens; the recorded ones took 5 to 12
SIGMOID_LOSSES = {"sigmoid", "sigmoid_norm"}  # they start at ln 2 and have their floor at 0

Entry = dict[str, Any]  # of transformers' log_history, with "step" and "loss"; other metrics may be missing
Log = list[Entry]
Evidence = tuple[int, str]  # the first logged step that shows it, and the figures


class RunFacts(NamedTuple):
    """What the rules need to know beside the log.

    `chosen_tokens` turns rewards/chosen into nats per token: rewards/chosen / (beta * chosen_tokens). It is the mean
    number of tokens in a chosen response, and 1 for a length-normalised loss.
    """

    sigmoid: bool
    beta: float
    chosen_tokens: float
    max_steps: int
    warmup_steps: int


class GuardRule(NamedTuple):
    """`check` looks at the end of a log. The texts are those of docs/health.md."""

    signal: str
    condition: str
    source: str
    remedy: str
    check: Callable[[Log, RunFacts], Evidence | None]
    stops: bool = False


class Finding(NamedTuple):
    """The fields are those of `findings` in health.json."""

    signal: str
    stops: bool
    step: int  # of the last entry
    began: int  # the first logged step that shows it
    seen: str
    remedy: str


def judge_log(log: Log, run: RunFacts) -> list[Finding]:
    """What the rules find at the end of `log` (in order of steps), those that stop a run first."""
    if not log:
        return []
    checks = [(rule, rule.check(log, run)) for rule in RULES]
    return [Finding(r.signal, r.stops, log[-1]["step"], *e, r.remedy) for r, e in checks if e is not None]


def format_finding(finding: Finding) -> str:
    return f"{finding.signal} at step {finding.step}, begun at step {finding.began}: {finding.seen}"


def _find_streak(log: Log, n: int, holds: Callable[[Entry], bool], begins: Callable[[Entry], bool] | None = None):
    """The first step of the unbroken run of entries at the end of `log` for which `begins` holds (by default `holds`),
    where `holds` is true of the last `n`; None where it is not."""
    if len(log) < n or not all(map(holds, log[-n:])):
        return None
    step = log[-n]["step"]
    for entry in reversed(log[:-n]):
        if not (begins or holds)(entry):
            break
        step = entry["step"]
    return step


def _check_finite(log: Log, run: RunFacts) -> Evidence | None:
    for name in ("loss", "rewards/margins", "logps/chosen", "logps/rejected"):
        if not math.isfinite(log[-1].get(name, 0.0)):
            return log[-1]["step"], f"{name} is {log[-1][name]}"
    began = _find_streak(log, 3, lambda e: not math.isfinite(e.get("grad_norm", 0.0)))
    return None if began is None else (began, f"grad_norm is {log[-1]['grad_norm']} for the third time in a row")


def _check_collapse(log: Log, run: RunFacts) -> Evidence | None:
    last = log[-1]
    margin = last.get("rewards/margins", 0.0)
    if margin <= 5 or (run.sigmoid and last["loss"] >= 0.01):
        return None
    if last.get("rewards/chosen", 0.0) >= margin / 2:
        return None  # the margin is made of chosen answers that became likelier: learnt by heart, not displaced
    recent = [e for e in log[:-1] if e["step"] >= last["step"] - COLLAPSE_STEPS] or log[-2:-1]
    before = [e for e in recent if e.get("rewards/margins", math.inf) < 1]
    if not before:
        return None
    start = before[-1]
    fell = f"loss {start['loss']:.3f} to {last['loss']:.3f}, " if run.sigmoid else ""
    rose = f"margin {start['rewards/margins']:.2f} to {margin:.2f} within {last['step'] - start['step']} steps"
    return log[log.index(start) + 1]["step"], fell + rose


def _check_displacement(log: Log, run: RunFacts, limit: float) -> Evidence | None:
    def loss_per_token(entry: Entry) -> float:
        return -entry.get("rewards/chosen", 0.0) / (run.beta * run.chosen_tokens)

    began = _find_streak(log, 3, lambda e: loss_per_token(e) > limit, lambda e: loss_per_token(e) > 0.3 * limit)
    return None if began is None else (began, f"chosen answers lost {loss_per_token(log[-1]):.2f} nats per token")


def _check_divergence(log: Log, run: RunFacts) -> Evidence | None:
    began = _find_streak(log, 5, lambda e: e["loss"] > 2, lambda e: e["loss"] > 1) if run.sigmoid else None
    return None if began is None else (began, f"loss {log[-1]['loss']:.2f}, above 2 five times in a row")


def _check_standstill(log: Log, run: RunFacts) -> Evidence | None:
    after = [e for e in log if e["step"] > run.warmup_steps and "rewards/margins" in e]
    needed = max(100, 0.2 * run.max_steps)
    if len(after) < 20 or log[-1]["step"] - run.warmup_steps < needed:
        return None
    half = len(after) // 2
    (early, _, early_high), (late, low, high) = (
        mean_interval([e["rewards/margins"] for e in part]) for part in (after[:half], after[half:])
    )
    noise = math.hypot(early_high - early, high - late)
    if high >= 0.02 or low <= -0.02 or late - early > noise:
        return None
    return after[0]["step"], f"margin {late:+.4f} (95% interval {low:+.4f} to {high:+.4f}), and not growing"


def _check_floor(log: Log, run: RunFacts) -> Evidence | None:
    def at_floor(entry: Entry) -> bool:
        return entry["loss"] < 0.01 and entry.get("rewards/margins", 0.0) > 5

    began = _find_streak(log, COLLAPSE_STEPS, at_floor) if run.sigmoid else None
    return None if began is None else (began, f"loss {log[-1]['loss']:.4f}: the gradient has all but gone")


def _check_accuracy(log: Log, run: RunFacts) -> Evidence | None:
    began = _find_streak(log, 10, lambda e: e.get("rewards/accuracies", 0.0) >= 0.99)
    if began is None or began > 0.1 * run.max_steps:
        return None
    return began, f"reward accuracy at 1 since step {began}"


def _check_gradient(log: Log, run: RunFacts) -> Evidence | None:
    norms = [e["grad_norm"] for e in log[-21:-1] if math.isfinite(e.get("grad_norm", math.nan))]
    norm = log[-1].get("grad_norm", 0.0)
    if len(norms) < 20 or not norm > 10 * median(norms):
        return None
    return log[-1]["step"], f"gradient norm {norm:.3g}, median of the 20 before {median(norms):.3g}"


def _check_entropy(log: Log, run: RunFacts) -> Evidence | None:
    entries = [e for e in log if "entropy" in e]
    start = fmean(e["entropy"] for e in entries[:5]) if len(entries) >= 10 else 0.0
    began = _find_streak(entries, 5, lambda e: e["entropy"] < 0.3 * start)
    if began is None:
        return None
    return began, f"entropy {entries[-1]['entropy']:.3f} nats per token, {start:.3f} at the start"


def _check_answers(log: Log, run: RunFacts) -> Evidence | None:
    rounds = [e for e in log if "guard/repeated_4grams" in e]
    if len(rounds) < 2 or rounds[-1] is not log[-1]:
        return None
    for name, what in (
        ("guard/repeated_4grams", "of the 4-grams in generated answers repeat"),
        ("guard/empty_answers", "of the generated answers are empty"),
    ):
        if log[-1][name] >= 0.5 and rounds[0][name] <= 0.25:
            return rounds[-2]["step"] + 1, f"{log[-1][name]:.0%} {what}"
    return None


def _check_answer_length(log: Log, run: RunFacts) -> Evidence | None:
    lengths = [e["guard/answer_tokens"] for e in log if "guard/answer_tokens" in e]
    if len(lengths) < 2 or "guard/answer_tokens" not in log[-1] or 0.1 * lengths[0] <= lengths[-1] <= 10 * lengths[0]:
        return None
    return log[-1]["step"], f"generated answers have {lengths[-1]:.0f} tokens, {lengths[0]:.0f} at the start"


_LOWER_LR = "lower learning_rate by 3 to 10 times"
_FAILED = "a failed project's runs (docs/health.md)"
RULES = (
    GuardRule(
        "non_finite",
        "loss, margin or log-probs are NaN or infinite once, or grad_norm three times in a row",
        "arithmetic: every later step is NaN too",
        f"{_LOWER_LR}; look for a pair with an empty or corrupt response near this step",
        _check_finite,
        stops=True,
    ),
    GuardRule(
        "collapse",
        f"loss below 0.01 and margin above 5, though the margin was below 1 at most {COLLAPSE_STEPS} steps (or one "
        "log entry) ago; not where chosen answers that became likelier make up half of the margin",
        _FAILED,
        f"{_LOWER_LR}, or beta; a loss on sums: use sigmoid_norm",
        _check_collapse,
        stops=True,
    ),
    GuardRule(
        "displacement",
        "the chosen answers have lost more than 1 nat per token, three log entries in a row",
        "arXiv 2410.08847 (likelihood displacement); 1 nat is a perplexity e times the base model's",
        f"{_LOWER_LR}; add an sft term (loss_type: [sigmoid_norm, sft]); filter pairs that are nearly alike",
        lambda log, run: _check_displacement(log, run, 1.0),
        stops=True,
    ),
    GuardRule(
        "divergence",
        "loss above 2, three times its start, five log entries in a row",
        "the loss starts at ln 2 = 0.69, and training lowers it",
        f"{_LOWER_LR}; check that chosen and rejected are not swapped in part of the data",
        _check_divergence,
        stops=True,
    ),
    GuardRule(
        "standstill",
        "over the second half of the steps since warmup (at least 100 of them and a fifth of the run) the mean margin "
        "with its 95% interval is within 0.02 of zero, and it is not growing",
        _FAILED + ": 600 steps in which nothing moved",
        "raise learning_rate 10 times; check that parameters are trainable and kept in fp32 by the optimizer",
        _check_standstill,
        stops=True,
    ),
    GuardRule(
        "repetition",
        "half of the 4-grams in the generated answers repeat, or half of the answers are empty (a quarter or less at "
        "the start)",
        _FAILED + ": 'hormonal hormonal hormonal'",
        f"{_LOWER_LR}, and go on from an earlier checkpoint",
        _check_answers,
        stops=True,
    ),
    GuardRule(
        "displacement_begins",
        "the chosen answers have lost more than 0.5 nats per token, three log entries in a row",
        "half of what stops a run",
        "watch the generated answers; a lower learning_rate or an sft term holds the chosen answers up",
        lambda log, run: _check_displacement(log, run, 0.5),
    ),
    GuardRule(
        "floor",
        f"loss below 0.01 and margin above 5 for {COLLAPSE_STEPS} log entries in a row",
        "the gradient's weight, sigmoid(-margin), is below 0.7%",
        "stop earlier next time: fewer epochs or a lower learning_rate",
        _check_floor,
    ),
    GuardRule(
        "saturated",
        "reward accuracy at 0.99 or more for 10 log entries in a row, from within the first tenth of the run",
        "pairs told apart so early differ by something simple: length, format, a phrase",
        "look at the pairs; harder pairs teach more",
        _check_accuracy,
    ),
    GuardRule(
        "gradient_spike",
        "gradient norm above 10 times the median of the 20 log entries before",
        "convention; clipping to max_grad_norm absorbs single spikes",
        "harmless if rare; often: lower learning_rate",
        _check_gradient,
    ),
    GuardRule(
        "entropy",
        "entropy below 0.3 times the mean of the first five log entries, five in a row",
        "an ever surer model repeats itself",
        f"{_LOWER_LR}; look at the generated answers",
        _check_entropy,
    ),
    GuardRule(
        "length_drift",
        "generated answers ten times longer or shorter than at the start",
        "length is what DPO learns first (arXiv 2403.19159)",
        "a length-normalised loss; pairs whose lengths differ less",
        _check_answer_length,
    ),
)


def summarize_metrics(log: Log) -> dict[str, dict[str, float]]:
    """Lowest, highest and last finite value of the metrics the rules look at."""
    names = "loss grad_norm entropy rewards/margins rewards/accuracies rewards/chosen rewards/rejected".split()
    names += "logps/chosen logps/rejected guard/repeated_4grams guard/empty_answers guard/answer_tokens".split()
    series = {name: [e[name] for e in log if math.isfinite(e.get(name, math.nan))] for name in names}
    return {name: {"min": min(v), "max": max(v), "last": v[-1]} for name, v in series.items() if v}
