"""What does the log show? The guard's rules: a log of metrics in, findings out.

Pure functions, so that a recorded run can be replayed without a model. All thresholds are here and in docs/health.md.
"""

import math
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, NamedTuple

from sfm_dpo.common.statistics import mean_interval

FAST = 20  # optimizer steps within which a collapse happens; the recorded ones took 5 to 12
SIGMOID_LOSSES = {"sigmoid", "sigmoid_norm"}  # they start at ln 2 and have their floor at 0

Log = list[dict[str, Any]]
# How far the mean |margin| / 2 of the first batch may be from 0, its value at policy = reference (then the loss is
# ln 2). 16-bit log-probs move with the shape of the batch.
STEP_0_TOLERANCE = {"32-bit": 1e-3, "16-bit": 5e-2}


class Run(NamedTuple):
    """What the rules need to know beside the log.

    `chosen_tokens` turns rewards/chosen into nats per token: rewards/chosen / (beta * chosen_tokens). It is the mean
    number of tokens in a chosen response, and 1 for a length-normalised loss.
    """

    sigmoid: bool
    beta: float
    chosen_tokens: float
    max_steps: int
    warmup_steps: int


class Rule(NamedTuple):
    """`find(log, run)` looks at the end of a log and returns (step it began, what was seen) or None."""

    signal: str
    stops: bool
    when: str  # for the reader of docs/health.md
    source: str
    remedy: str
    find: Callable[[Log, Run], tuple[int, str] | None]


class Finding(NamedTuple):
    signal: str
    stops: bool
    step: int  # seen at
    began: int  # the first logged step that shows it
    seen: str
    remedy: str


def judge(log: Log, run: Run) -> list[Finding]:
    """What the rules find at the end of `log`, those that stop a run first.

    Args:
        log: training entries of transformers' log_history (with "step" and "loss"), in order. Metrics may be missing.
    """
    if not log:
        return []
    found = [(rule, rule.find(log, run)) for rule in RULES]
    return [Finding(r.signal, r.stops, log[-1]["step"], *f, r.remedy) for r, f in found if f is not None]


def _non_finite(log: Log, run: Run) -> tuple[int, str] | None:
    names = ("loss", "rewards/margins", "logps/chosen", "logps/rejected")
    bad = [name for name in names if not math.isfinite(log[-1].get(name, 0.0))]
    if bad:
        return log[-1]["step"], f"{bad[0]} is {log[-1][bad[0]]}"
    last = log[-3:]
    if len(last) == 3 and not any(math.isfinite(e.get("grad_norm", 0.0)) for e in last):
        return last[0]["step"], f"grad_norm is {log[-1]['grad_norm']} for the third time in a row"
    return None


def _collapse(log: Log, run: Run) -> tuple[int, str] | None:
    now = log[-1]
    margin = now.get("rewards/margins", 0.0)
    if margin <= 5 or (run.sigmoid and now["loss"] >= 0.01):
        return None
    if now.get("rewards/chosen", 0.0) >= margin / 2:
        return None  # the margin is made of chosen answers that became likelier: learnt by heart, not displaced
    recent = [e for e in log[:-1] if e["step"] >= now["step"] - FAST] or log[-2:-1]
    before = [e for e in recent if e.get("rewards/margins", math.inf) < 1]
    if not before:
        return None
    began = log[log.index(before[-1]) + 1]["step"]
    fell = f"loss {before[-1]['loss']:.3f} to {now['loss']:.3f}, " if run.sigmoid else ""
    steps = now["step"] - before[-1]["step"]
    return began, f"{fell}margin {before[-1]['rewards/margins']:.2f} to {margin:.2f} within {steps} steps"


def _displacement(log: Log, run: Run, limit: float) -> tuple[int, str] | None:
    def change(entry):
        return entry.get("rewards/chosen", 0.0) / (run.beta * run.chosen_tokens)

    if len(log) < 3 or not all(change(e) < -limit for e in log[-3:]):
        return None
    began = _first_of_tail(log, lambda e: change(e) < -0.3 * limit)
    return began, f"chosen answers lost {-change(log[-1]):.2f} nats per token"


def _divergence(log: Log, run: Run) -> tuple[int, str] | None:
    if not run.sigmoid or len(log) < 5 or not all(e["loss"] > 2 for e in log[-5:]):
        return None
    return _first_of_tail(log, lambda e: e["loss"] > 1), f"loss {log[-1]['loss']:.2f}, above 2 five times in a row"


def _standstill(log: Log, run: Run) -> tuple[int, str] | None:
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


def _floor(log: Log, run: Run) -> tuple[int, str] | None:
    def at_floor(entry):
        return entry["loss"] < 0.01 and entry.get("rewards/margins", 0.0) > 5

    if not run.sigmoid or len(log) < FAST or not all(at_floor(e) for e in log[-FAST:]):
        return None
    return _first_of_tail(log, at_floor), f"loss {log[-1]['loss']:.4f}: the gradient has all but gone"


def _saturated(log: Log, run: Run) -> tuple[int, str] | None:
    def saturated(entry):
        return entry.get("rewards/accuracies", 0.0) >= 0.99

    if len(log) < 10 or not all(saturated(e) for e in log[-10:]):
        return None
    began = _first_of_tail(log, saturated)
    return (began, f"reward accuracy at 1 since step {began}") if began <= 0.1 * run.max_steps else None


def _gradient_spike(log: Log, run: Run) -> tuple[int, str] | None:
    norms = [e["grad_norm"] for e in log[-21:-1] if math.isfinite(e.get("grad_norm", math.nan))]
    now = log[-1].get("grad_norm", 0.0)
    if len(norms) < 20 or not now > 10 * median(norms):
        return None
    return log[-1]["step"], f"gradient norm {now:.3g}, median of the 20 before {median(norms):.3g}"


def _entropy(log: Log, run: Run) -> tuple[int, str] | None:
    values = [e["entropy"] for e in log if "entropy" in e]
    if len(values) < 10 or not max(values[-5:]) < 0.3 * fmean(values[:5]):
        return None
    began = _first_of_tail(log, lambda e: e.get("entropy", 0.0) < 0.3 * fmean(values[:5]))
    return began, f"entropy {values[-1]:.3f} nats per token, {fmean(values[:5]):.3f} at the start"


def _repetition(log: Log, run: Run) -> tuple[int, str] | None:
    rounds = [e for e in log if "guard/repeated_4grams" in e]
    if len(rounds) < 2 or rounds[-1] is not log[-1]:
        return None
    first, now = rounds[0], rounds[-1]
    if now["guard/repeated_4grams"] >= 0.5 and first["guard/repeated_4grams"] <= 0.25:
        seen = f"{now['guard/repeated_4grams']:.0%} of the 4-grams in generated answers repeat"
    elif now["guard/empty_answers"] >= 0.5 and first["guard/empty_answers"] <= 0.25:
        seen = f"{now['guard/empty_answers']:.0%} of the generated answers are empty"
    else:
        return None
    return rounds[-2]["step"] + 1, seen


def _length_drift(log: Log, run: Run) -> tuple[int, str] | None:
    lengths = [e["guard/answer_tokens"] for e in log if "guard/answer_tokens" in e]
    if len(lengths) < 2 or "guard/answer_tokens" not in log[-1] or 0.1 * lengths[0] <= lengths[-1] <= 10 * lengths[0]:
        return None
    return log[-1]["step"], f"generated answers have {lengths[-1]:.0f} tokens, {lengths[0]:.0f} at the start"


def _first_of_tail(log: Log, holds: Callable[[dict], bool]) -> int:
    """Step of the first entry of the unbroken run of entries at the end of `log` for which `holds`."""
    began = log[-1]["step"]
    for entry in reversed(log):
        if not holds(entry):
            break
        began = entry["step"]
    return began


_LOWER_LR = "lower learning_rate by 3 to 10 times"
_FAILED = "a failed project's runs (docs/health.md)"
RULES = (
    Rule(
        "non_finite",
        True,
        "loss, margin or log-probs are NaN or infinite once, or grad_norm three times in a row",
        "arithmetic: every later step is NaN too",
        f"{_LOWER_LR}; look for a pair with an empty or corrupt response near this step",
        _non_finite,
    ),
    Rule(
        "collapse",
        True,
        f"loss below 0.01 and margin above 5, though the margin was below 1 at most {FAST} steps (or one log entry) "
        "ago; not where chosen answers that became likelier make up half of the margin",
        _FAILED,
        f"{_LOWER_LR}, or beta; a loss on sums: use sigmoid_norm",
        _collapse,
    ),
    Rule(
        "displacement",
        True,
        "the chosen answers have lost more than 1 nat per token, three log entries in a row",
        "arXiv 2410.08847 (likelihood displacement); 1 nat is a perplexity e times the base model's",
        f"{_LOWER_LR}; add an sft term (loss_type: [sigmoid_norm, sft]); filter pairs that are nearly alike",
        lambda log, run: _displacement(log, run, 1.0),
    ),
    Rule(
        "divergence",
        True,
        "loss above 2, three times its start, five log entries in a row",
        "the loss starts at ln 2 = 0.69, and training lowers it",
        f"{_LOWER_LR}; check that chosen and rejected are not swapped in part of the data",
        _divergence,
    ),
    Rule(
        "standstill",
        True,
        "over the second half of the steps since warmup (at least 100 of them and a fifth of the run) the mean margin "
        "with its 95% interval is within 0.02 of zero, and it is not growing",
        _FAILED + ": 600 steps in which nothing moved",
        "raise learning_rate 10 times; check that parameters are trainable and kept in fp32 by the optimizer",
        _standstill,
    ),
    Rule(
        "repetition",
        True,
        "half of the 4-grams in the generated answers repeat, or half of the answers are empty (a quarter or less at "
        "the start)",
        _FAILED + ": 'hormonal hormonal hormonal'",
        f"{_LOWER_LR}, and go on from an earlier checkpoint",
        _repetition,
    ),
    Rule(
        "displacement_begins",
        False,
        "the chosen answers have lost more than 0.5 nats per token, three log entries in a row",
        "half of what stops a run",
        "watch the generated answers; a lower learning_rate or an sft term holds the chosen answers up",
        lambda log, run: _displacement(log, run, 0.5),
    ),
    Rule(
        "floor",
        False,
        f"loss below 0.01 and margin above 5 for {FAST} log entries in a row",
        "the gradient's weight, sigmoid(-margin), is below 0.7%",
        "stop earlier next time: fewer epochs or a lower learning_rate",
        _floor,
    ),
    Rule(
        "saturated",
        False,
        "reward accuracy at 0.99 or more for 10 log entries in a row, from within the first tenth of the run",
        "pairs told apart so early differ by something simple: length, format, a phrase",
        "look at the pairs; harder pairs teach more",
        _saturated,
    ),
    Rule(
        "gradient_spike",
        False,
        "gradient norm above 10 times the median of the 20 log entries before",
        "convention; clipping to max_grad_norm absorbs single spikes",
        "harmless if rare; often: lower learning_rate",
        _gradient_spike,
    ),
    Rule(
        "entropy",
        False,
        "entropy below 0.3 times the mean of the first five log entries, five in a row",
        "an ever surer model repeats itself",
        f"{_LOWER_LR}; look at the generated answers",
        _entropy,
    ),
    Rule(
        "length_drift",
        False,
        "generated answers ten times longer or shorter than at the start",
        "length is what DPO learns first (arXiv 2403.19159)",
        "a length-normalised loss; pairs whose lengths differ less",
        _length_drift,
    ),
)


def observed(log: Log) -> dict[str, dict[str, float]]:
    """Lowest, highest and last finite value of the metrics the rules look at."""
    names = "loss grad_norm entropy rewards/margins rewards/accuracies rewards/chosen rewards/rejected".split()
    names += "logps/chosen logps/rejected guard/repeated_4grams guard/empty_answers guard/answer_tokens".split()
    series = {name: [e[name] for e in log if math.isfinite(e.get(name, math.nan))] for name in names}
    return {name: {"min": min(v), "max": max(v), "last": v[-1]} for name, v in series.items() if v}
