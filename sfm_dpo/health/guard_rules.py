"""Rules of the guard: pure functions from a training log to findings, so that a log can be replayed.

All thresholds are here; docs/health.md explains them.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from sfm_dpo.common.statistics import mean_interval
from sfm_dpo.run.checkpoint import COLLAPSE_STEPS

SIGMOID_LOSSES = {"sigmoid", "sigmoid_norm"}  # they start at ln 2, and 0 is their minimum

Entry = dict[str, Any]  # of transformers' log_history, with "step" and "loss"; other metrics may be missing
Log = list[Entry]
START: Entry = {"step": 0, "loss": math.log(2), "rewards/margins": 0.0}  # where policy = reference
Evidence = tuple[int, str]  # the first logged step that shows it, and its values in words


class GuardContext(NamedTuple):
    """What the rules need besides the log. rewards/chosen / (beta * chosen_tokens) is in nats per token."""

    sigmoid: bool
    beta: float
    chosen_tokens: float  # mean of the chosen responses; 1 for a length-normalised loss
    max_steps: int
    warmup_steps: int  # or the step of another run's checkpoint that this run starts from, if that is later
    other_reference: bool = False  # neither do rewards start at 0 nor the loss at ln 2


class GuardRule(NamedTuple):
    """`check` looks at the end of a log."""

    signal: str
    stops: bool
    check: Callable[[Log, GuardContext], Evidence | None]
    remedy: str


class Finding(NamedTuple):  # as in health.json
    signal: str
    stops: bool
    step: int  # of the last entry
    began: int  # the first logged step that shows it
    seen: str
    remedy: str
    mode: str = ""  # `guard` when the run met it

    def describe(self) -> str:
        return f"{self.signal} at step {self.step}, began at step {self.began}: {self.seen}"


def judge_log(log: Log, run: GuardContext) -> list[Finding]:
    """The findings at the end of `log` (since the run began, in order of steps); those that stop a run come first."""
    findings = []
    for rule in RULES:
        if evidence := rule.check(log, run):
            remedy = rule.remedy.removesuffix(_IF_ON_SUMS) if run.chosen_tokens == 1 else rule.remedy
            findings.append(Finding(rule.signal, rule.stops, log[-1]["step"], *evidence, remedy))
    return findings


def _find_streak(
    log: Log, n: int, figures: str, value: Callable[[Entry], float], limit: float, begins: float
) -> Evidence | None:
    """Evidence if `value` is above `limit` in the last `n` entries; it began where `value` rose above `begins`."""
    if len(log) < n or not all(value(entry) > limit for entry in log[-n:]):
        return None
    step = log[-n]["step"]
    for entry in reversed(log[:-n]):
        if value(entry) <= begins:
            break
        step = entry["step"]
    return step, figures


def _check_finite(log: Log, run: GuardContext) -> Evidence | None:
    last = log[-1]
    for name in ("loss", "rewards/margins", "logps/chosen", "logps/rejected"):
        if not math.isfinite(last.get(name, 0.0)):
            return last["step"], f"{name} is {last[name]}"
    norms = [entry.get("grad_norm", 0.0) for entry in log[-3:]]
    if len(norms) == 3 and not any(map(math.isfinite, norms)):
        return log[-3]["step"], f"grad_norm is {norms[-1]} for the third time in a row"
    return None


def _check_skipped(log: Log, run: GuardContext) -> Evidence | None:
    if skipped := log[-1].get("skipped_updates"):
        return log[-1]["step"], f"DeepSpeed has skipped {skipped} update(s), whose gradients were not finite"
    return None


def _check_collapse(log: Log, run: GuardContext) -> Evidence | None:
    last = log[-1]
    margin = last.get("rewards/margins", 0.0)
    if margin <= 5 or (run.sigmoid and last["loss"] >= 0.01):
        return None
    if last.get("rewards/chosen", 0.0) >= margin / 2:
        return None  # the margin comes from chosen answers that became likelier: memorised, not displaced
    rises = [pair for pair in pairwise(log) if pair[0].get("rewards/margins", math.inf) < 1]
    # The last rise took this long at least: an entry is the mean of its steps
    if not rises or log[-2]["step"] + 1 - rises[-1][1]["step"] >= COLLAPSE_STEPS:
        return None
    start, first = rises[-1]
    figures = f"margin {start['rewards/margins']:.2f} to {margin:.2f} within {last['step'] - start['step']} steps"
    if run.sigmoid:
        figures = f"loss {start['loss']:.3f} to {last['loss']:.3f}, {figures}"
    return first["step"], figures


def _check_displacement(log: Log, run: GuardContext) -> Evidence | None:
    start = log[0].get("rewards/chosen", 0.0) if run.other_reference else 0.0

    def loss_per_token(entry: Entry) -> float:
        return (start - entry.get("rewards/chosen", 0.0)) / (run.beta * run.chosen_tokens)

    figures = f"chosen answers lost {loss_per_token(log[-1]):.2f} nats per token"
    return _find_streak(log, 3, figures, loss_per_token, limit=1.0, begins=0.3)


def _check_divergence(log: Log, run: GuardContext) -> Evidence | None:
    if not run.sigmoid:
        return None
    limit = max(2.0, 3 * log[0]["loss"]) if run.other_reference else 2.0
    figures = f"loss {log[-1]['loss']:.2f}, above {limit:.3g} five times in a row"
    return _find_streak(log, 5, figures, itemgetter("loss"), limit, begins=limit / 2)


def _check_standstill(log: Log, run: GuardContext) -> Evidence | None:
    after = [e for e in log if e["step"] > run.warmup_steps and "rewards/margins" in e]
    needed = max(100, 0.2 * run.max_steps)
    if len(after) < 20 or log[-1]["step"] - run.warmup_steps < needed:
        return None
    margins = [e["rewards/margins"] for e in after]
    half = len(margins) // 2
    early, _, early_high = mean_interval(margins[:half])
    late, low, high = mean_interval(margins[half:])
    noise = math.hypot(early_high - early, high - late)
    if high >= 0.02 or low <= -0.02 or late - early > noise:
        return None
    return after[0]["step"], f"margin {late:+.4f} (95% interval {low:+.4f} to {high:+.4f}), and not growing"


_LOWER_LR = "lower learning_rate by a factor of 3 to 10"
_CORRUPT = f"{_LOWER_LR}; look for a pair with an empty or corrupt response near this step"
_DISPLACED = f"{_LOWER_LR}; add an sft term (loss_type: [sigmoid_norm, sft]); filter nearly identical answers"
_DIVERGED = f"{_LOWER_LR}; check that chosen and rejected are not swapped in part of the data"
_IF_ON_SUMS = "; or use sigmoid_norm"  # a loss on means
_STUCK = "raise learning_rate by a factor of 10; check that parameters are trainable and kept in fp32 by the optimizer"
RULES = (
    GuardRule("non_finite", True, _check_finite, _CORRUPT),
    GuardRule("collapse", True, _check_collapse, f"{_LOWER_LR}, or lower beta{_IF_ON_SUMS}"),
    GuardRule("displacement", True, _check_displacement, _DISPLACED),
    GuardRule("divergence", True, _check_divergence, _DIVERGED),
    GuardRule("standstill", True, _check_standstill, _STUCK),
    GuardRule("skipped_update", False, _check_skipped, _CORRUPT),
)
