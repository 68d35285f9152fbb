"""Do two runs agree? Metric by metric and step by step, what differs between them, and the first suspect."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sfm_dpo.errors import UserError
from sfm_dpo.run_log import RunLog
from sfm_dpo.signals import STEP_0_TOLERANCE
from sfm_dpo.suspects import differences, find_suspects

# Shown first, in this order; the others follow by name.
_FIRST = "train/loss rewards/margins rewards/chosen rewards/rejected logps/chosen logps/rejected".split()
_FIRST += "grad_norm entropy learning_rate".split()


@dataclass
class Difference:
    """Of one metric over the common steps. `relative` is |a - b| / max(|a|, |b|), at the step where it is largest.

    `beyond` is the first step at which the difference exceeds the tolerance; None also where `decides` is false.
    """

    metric: str
    absolute: float
    relative: float
    first: int | None  # step of the first difference of any size
    beyond: int | None
    decides: bool
    at_start: float  # at the first common step, in units of the metric's scale (see metric_difference)


def compare(a: RunLog, b: RunLog, tolerance: float | None = None, until: int | None = None) -> dict[str, Any]:
    """Everything about the two, as plain types: metrics, verdict, suspects, what differs.

    Raises:
        UserError: fewer than two common steps, no common metric, or a value that is no finite number.
    """
    a_log, b_log, note = align(a, b, until)
    names = {name for values in a_log.values() for name in values}
    names &= {name for values in b_log.values() for name in values}
    if not names:
        raise UserError(f"{a.name} and {b.name}: no metric in common: {_some(a_log)} against {_some(b_log)}")
    sixteen_bit = any(run.config.get(key) for run in (a, b) for key in ("bf16", "fp16"))
    tolerance = tolerance or STEP_0_TOLERANCE["16-bit" if sixteen_bit else "32-bit"]
    rows, series = [], {}
    for name in sorted(names, key=lambda n: (_FIRST.index(n) if n in _FIRST else 99, n)):
        steps = [step for step in a_log if name in a_log[step] and name in b_log.get(step, {})]
        if steps:
            x, y = (np.array([log[step][name] for step in steps]) for log in (a_log, b_log))
            _must_be_finite(name, steps, (a, x), (b, y))
            rows.append(metric_difference(name, steps, x, y, tolerance))
            series[name] = {"steps": steps, "a": x.tolist(), "b": y.tolist()}
    differing = differences(a, b)
    suspects = find_suspects(rows, min(a_log), differing) if any(row.absolute for row in rows) else []
    return {
        "runs": {"a": f"{a.name} ({a.kind})", "b": f"{b.name} ({b.kind})"},
        "common_steps": [min(a_log), max(a_log), len(a_log)],
        "note": note,
        "tolerance": tolerance,
        "metrics": [asdict(row) for row in rows],
        "verdict": verdict(rows),
        "suspects": suspects,
        "differences": differing,
        "series": series,
    }


def align(a: RunLog, b: RunLog, until: int | None = None) -> tuple[dict, dict, str]:
    """The two logs at their common steps, and a line that says what was done to them.

    A logged value is the mean since the last logged step, so where one run logged more often, its values are averaged
    over the other's intervals.
    """
    logs = [{step: values for step, values in run.steps.items() if until is None or step <= until} for run in (a, b)]
    common = sorted(set(logs[0]) & set(logs[1]))
    if len(common) < 2:
        spans = [f"{min(log)} to {max(log)}" if log else "none" for log in logs]
        raise UserError(
            f"{a.name} and {b.name}: {len(common)} logged step(s) in common (steps {spans[0]} against {spans[1]}); "
            "a comparison needs 2: set logging_steps: 1 and train further"
        )
    notes, out = [], []
    for run, log in zip((a, b), logs, strict=True):
        within = [step for step in log if step <= common[-1]]
        if len(within) > len(common) and any("train/loss" in log[step] for step in set(within) - set(common)):
            notes.append(f"{run.name} logged more often: its values are averaged over the other's intervals")
            edges = [0, *common]
            log = {
                stop: _mean([log[step] for step in within if start < step <= stop])
                for start, stop in zip(edges, common, strict=False)
            }
        out.append({step: log[step] for step in common})
    return out[0], out[1], "; ".join(notes)


def metric_difference(name: str, steps: list[int], x: np.ndarray, y: np.ndarray, tolerance: float) -> Difference:
    """Of two series [n] at the same steps.

    The tolerance is relative to the larger value of a step, but at least to the metric's median size, and for the
    loss and the rewards at least to 1: they are in nats of the loss, whose gradient they bend by that much. Shares of
    pairs jump by whole pairs where a margin crosses 0, and learning rate and number of tokens are causes, not
    effects: they do not decide.
    """
    gap = np.abs(x - y)
    larger = np.maximum(np.abs(x), np.abs(y))
    relative = np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0)
    scale = np.maximum(larger, np.median(larger))
    if name.endswith("loss") or "rewards/" in name:
        scale = np.maximum(scale, 1.0)
    decides = not any(part in name for part in ("accurac", "learning_rate", "num_tokens"))
    beyond = np.flatnonzero((gap > tolerance * scale) & decides)
    first = np.flatnonzero(gap)
    return Difference(
        name,
        float(gap.max()),
        float(relative.max()),
        steps[first[0]] if len(first) else None,
        steps[beyond[0]] if len(beyond) else None,
        decides,
        float(gap[0] / scale[0]) if scale[0] else 0.0,
    )


def verdict(rows: list[Difference]) -> dict[str, Any]:
    """`identical`, `within noise`, or `diverging` with the step and the metric that left the tolerance first."""
    if not any(row.absolute for row in rows):
        return {"verdict": "identical", "step": None, "metric": None}
    out = [(row.beyond, row.metric) for row in rows if row.beyond is not None]
    if not out:
        return {"verdict": "within noise", "step": None, "metric": None}
    step, metric = min(out, key=lambda entry: entry[0])
    return {"verdict": "diverging", "step": step, "metric": metric}


def as_text(result: dict[str, Any]) -> str:
    """The table, what differs, the verdict and the suspects, for a terminal."""
    low, high, count = result["common_steps"]
    lines = [f"A  {result['runs']['a']}", f"B  {result['runs']['b']}"]
    lines.append(f"{count} common steps, {low} to {high}; tolerance {result['tolerance']:g}")
    lines += [result["note"]] * bool(result["note"])
    width = max(len(row["metric"]) for row in result["metrics"])
    lines += [
        "",
        f"{'metric':<{width}}  {'max abs diff':>12}  {'max rel diff':>12}  {'differs from':>12}  beyond tolerance",
    ]
    for row in result["metrics"]:
        first = "-" if row["first"] is None else f"step {row['first']}"
        beyond = "-" if row["beyond"] is None else f"step {row['beyond']}"
        beyond = beyond if row["decides"] else "does not decide"
        lines.append(
            f"{row['metric']:<{width}}  {row['absolute']:>12.2e}  {row['relative']:>12.2e}  {first:>12}  {beyond}"
        )
    lines.append("")
    for topic, entries in result["differences"].items():
        if isinstance(entries, str):
            lines.append(f"{topic}: {entries}")
        for name, (x, y) in entries.items() if isinstance(entries, dict) else ():
            lines.append(f"{topic}: {name}  A {_short(x)}  B {_short(y)}")
    lines += ["", f"verdict: {sentence(result)}"]
    for i, suspect in enumerate(result["suspects"]):
        lines.append(f"{'first suspect' if i == 0 else 'then'}: {suspect['cause']}: {suspect['why']}")
    return "\n".join(lines)


def sentence(result: dict[str, Any]) -> str:
    found = result["verdict"]
    if found["verdict"] == "identical":
        return "identical, bit by bit, in every common metric"
    if found["verdict"] == "within noise":
        return f"equal within noise (tolerance {result['tolerance']:g})"
    series = result["series"][found["metric"]]
    at = series["steps"].index(found["step"])
    return (
        f"diverging from step {found['step']} ({found['metric']}: {series['a'][at]:.6g} in A, {series['b'][at]:.6g} "
        f"in B; tolerance {result['tolerance']:g})"
    )


def _must_be_finite(name: str, steps: list[int], *runs: tuple[RunLog, np.ndarray]) -> None:
    for run, values in runs:
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            step = steps[bad[0]]
            remedy = f"compare the steps before it with --until {steps[bad[0] - 1]}" if bad[0] > 1 else "mend that run"
            raise UserError(f"{run.name}: {name} is {values[bad[0]]} at step {step}; {remedy}")


def _mean(entries: list[dict[str, float]]) -> dict[str, float]:
    names = {name for entry in entries for name in entry}
    # The learning rate is that of the step, not a mean
    return {
        name: entries[-1].get(name, math.nan)
        if name == "learning_rate"
        else float(np.mean([entry[name] for entry in entries if name in entry]))
        for name in names
    }


def _some(log: dict[int, dict[str, float]]) -> str:
    return ", ".join(sorted({name for values in log.values() for name in values})[:4])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
