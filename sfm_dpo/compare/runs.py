"""Comparison of two runs: every common metric step by step, and what else differs between them.

docs/reproducibility.md explains the tolerance.
"""

from bisect import bisect_left
from collections import defaultdict
from typing import Any

import numpy as np

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.tables import format_table
from sfm_dpo.compare.run_log import RunLog
from sfm_dpo.run.folder import MAY_DIFFER

Log = dict[int, dict[str, float]]

# Shown first, in this order; the others follow by name
_FIRST = """train/loss rewards/margins rewards/chosen rewards/rejected logps/chosen logps/rejected grad_norm entropy
    learning_rate""".split()
_OF_THE_STEP = ("learning_rate", "num_tokens", "eval/")  # other logged values are means since the last logged step
_NO_EFFECT = MAY_DIFFER - {"gradient_accumulation_steps"} | {"logging_dir", "eval_strategy", "eval_steps"}
# datasets' own fingerprint also changes with the path of a file; the hash of the tokens does not
_DATA_FACTS = ("sources", "rows", "train", "eval", "train_tokens", "order")
_ENVIRONMENT_FACTS = ("git_commit", "cuda", "gpus", "world_size")


def compare_runs(a: RunLog, b: RunLog, tolerance: float | None = None, until: int | None = None) -> dict[str, Any]:
    """Metrics, verdict and differences of two runs, as plain types.

    Args:
        tolerance: relative; by default 0.05 where a run is in 16 bit, else 0.001.
        until: the last step to compare.

    Raises:
        UserError: fewer than two common steps, no common metric, or a value that is not finite.
    """
    if tolerance is None:
        is_16_bit = any(run.config.get(field) for run in (a, b) for field in ("bf16", "fp16"))
        tolerance = 5e-2 if is_16_bit else 1e-3
    series = align_series(a, b, until)
    rows = [compare_metric(name, values, tolerance) for name, values in series.items()]
    beyond = [(row["beyond"], row["metric"]) for row in rows if row["beyond"] is not None]
    step, metric = min(beyond, default=(None, None))
    if not any(row["absolute"] for row in rows):
        verdict = "identical"
    else:
        verdict = "within noise" if step is None else "diverging"
    steps = sorted({step for values in series.values() for step in values["steps"]})
    return {
        "runs": {"a": a.name, "b": b.name},
        "common_steps": [steps[0], steps[-1], len(steps)],
        "tolerance": tolerance,
        "metrics": rows,
        "verdict": {"verdict": verdict, "step": step, "metric": metric},
        "differences": find_differences(a, b),
        "series": series,
    }


def align_series(a: RunLog, b: RunLog, until: int | None) -> dict[str, dict[str, list]]:
    """{metric: {"steps", "a", "b"}} of the common metrics at the common steps.

    A logged value is the mean since the last logged step, so where one run logged more often, its values are averaged
    over the other's intervals.
    """
    common = sorted(step for step in a.steps.keys() & b.steps.keys() if until is None or step <= until)
    if len(common) < 2:
        raise UserError(
            f"{a.name} and {b.name}: {len(common)} logged step(s) in common; a comparison needs 2: set "
            "logging_steps: 1 and train further"
        )
    a_log = average_between(a.steps, common)
    b_log = average_between(b.steps, common)
    names = {name for values in a_log.values() for name in values} & {name for v in b_log.values() for name in v}
    series: dict[str, dict[str, list]] = {}
    for name in sorted(names, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)):
        steps = [step for step in common if name in a_log[step] and name in b_log[step]]
        if steps:
            x = [a_log[step][name] for step in steps]
            y = [b_log[step][name] for step in steps]
            check_finite(name, steps, x, y)
            series[name] = {"steps": steps, "a": x, "b": y}
    if not series:
        raise UserError(f"{a.name} and {b.name}: no metric in common")
    return series


def average_between(log: Log, common: list[int]) -> Log:
    """The log at the common steps: the mean of a metric since the common step before, or its value of that step."""
    values_by_step: dict[int, dict[str, list[float]]] = {step: defaultdict(list) for step in common}
    for step, values in log.items():
        if step > common[-1]:
            continue
        next_common = common[bisect_left(common, step)]
        for name, value in values.items():
            values_by_step[next_common][name].append(value)
    averaged: Log = {}
    for step, metrics in values_by_step.items():
        averaged[step] = {
            name: values[-1] if name.startswith(_OF_THE_STEP) else sum(values) / len(values)
            for name, values in metrics.items()
        }
    return averaged


def check_finite(name: str, steps: list[int], x: list[float], y: list[float]) -> None:
    """Raises UserError at the first value that is NaN or infinite."""
    finite = np.isfinite(x) & np.isfinite(y)
    if finite.all():
        return
    i = int(finite.argmin())
    remedy = f"compare the steps before it with --until {steps[i - 1]}" if i > 1 else "no steps before it"
    raise UserError(f"{name} at step {steps[i]}: {x[i]} in A, {y[i]} in B; {remedy}")


def compare_metric(name: str, series: dict[str, list], tolerance: float) -> dict[str, Any]:
    """The largest difference of a metric, `absolute` and `relative` to the larger value; the `first` step with a
    difference of any size, and `beyond`, the first with one beyond the tolerance, or None.

    A difference counts relative to the larger value of its step, but at least to the metric's median size, and for the
    loss and the rewards at least to 1: they are in nats of the loss, whose gradient they bend by that much. Metrics
    that do not `decide` are never beyond: shares of pairs jump by whole pairs where a margin crosses 0; learning rate
    and number of tokens are causes, not effects.
    """
    steps = series["steps"]
    x = np.array(series["a"])
    y = np.array(series["b"])
    gap = np.abs(x - y)
    larger = np.maximum(np.abs(x), np.abs(y))
    scale = np.maximum(larger, np.median(larger))
    if name.endswith("loss") or "rewards/" in name:
        scale = np.maximum(scale, 1.0)
    decides = not any(part in name for part in ("accurac", "learning_rate", "num_tokens"))
    differing = np.flatnonzero(gap > 0)
    beyond = np.flatnonzero(decides & (gap > tolerance * scale))
    return {
        "metric": name,
        "absolute": float(gap.max()),
        "relative": float(np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0).max()),
        "first": steps[differing[0]] if len(differing) else None,
        "beyond": steps[beyond[0]] if len(beyond) else None,
        "decides": decides,
    }


def find_differences(a: RunLog, b: RunLog) -> dict[str, Any]:
    """{topic: {name: (in A, in B)}}, or a sentence where a topic cannot be compared or is the same."""
    differences: dict[str, Any] = {}
    a_facts = _select_facts(a)
    b_facts = _select_facts(b)
    for topic, x in a_facts.items():
        y = b_facts[topic]
        if x and y:
            # A run of another code base has other fields than ours: only common ones can differ
            differing = {name: (x[name], y[name]) for name in x if name in y and x[name] != y[name]}
            differences[topic] = differing or "the same"
        else:
            differences[topic] = f"not compared: {b.name if x else a.name} has no information"
    return differences


def _select_facts(run: RunLog) -> dict[str, dict[str, Any]]:
    """What may explain a difference, by topic."""
    environment = {name: run.environment[name] for name in _ENVIRONMENT_FACTS if name in run.environment}
    for name, version in run.environment.get("versions", {}).items():
        environment[f"versions.{name}"] = version
    return {
        "configuration": {name: value for name, value in run.config.items() if name not in _NO_EFFECT},
        "environment": environment,
        "data": {name: run.data[name] for name in _DATA_FACTS if name in run.data},
        "reference cache": run.data.get("reference", {}).get("train", {}),
    }


def format_comparison(result: dict[str, Any]) -> str:
    """The table, what differs, and the verdict, for a terminal."""
    low, high, count = result["common_steps"]
    tolerance = f"tolerance {result['tolerance']:g}"
    lines = [f"A  {result['runs']['a']}", f"B  {result['runs']['b']}"]
    lines += [f"{count} common steps, {low} to {high}; {tolerance}", ""]
    table = []
    for row in result["metrics"]:
        first, beyond = ("-" if row[key] is None else f"step {row[key]}" for key in ("first", "beyond"))
        sizes = [f"{row['absolute']:.2e}", f"{row['relative']:.2e}"]
        table.append([row["metric"], *sizes, first, beyond if row["decides"] else "does not decide"])
    headings = ["metric", "max abs diff", "max rel diff", "differs from", "beyond tolerance"]
    lines += [format_table(table, headings, align="lrrrl", indent=0), ""]
    for topic, entries in result["differences"].items():
        if isinstance(entries, str):
            lines.append(f"{topic}: {entries}")
        else:
            lines += [f"{topic}: {name}  A {_shorten(x)}  B {_shorten(y)}" for name, (x, y) in entries.items()]
    return "\n".join([*lines, "", f"verdict: {_describe_verdict(result)} ({tolerance})"])


def _describe_verdict(result: dict[str, Any]) -> str:
    verdict = result["verdict"]
    if verdict["verdict"] == "identical":
        return "identical, bit by bit, in every common metric"
    if verdict["verdict"] == "within noise":
        return "equal within noise"
    series = result["series"][verdict["metric"]]
    i = series["steps"].index(verdict["step"])
    values = f"{series['a'][i]:.6g} in A, {series['b'][i]:.6g} in B"
    return f"diverging from step {verdict['step']}: {verdict['metric']} is {values}"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
