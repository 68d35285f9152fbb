"""Comparison of two runs: every common metric step by step, and the other differences between the runs."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import format_table
from sfm_dpo.config.effects import NO_EFFECT
from sfm_dpo.run.reader import read_run, to_float

# {metric: {(step of the entry before, step): value}}; the former is 0 if the value is not a mean since then
Log = dict[str, dict[tuple[int, int], float]]

_OMITTED = ("step", "perf/", "runtime", "per_second", "total_flos", "epoch")
# Shown first, in this order; others follow sorted by name
_FIRST = "loss logps/chosen logps/rejected rewards/margins grad_norm rewards/chosen rewards/rejected entropy".split()
# Values of the logged step itself; others are means over the steps since the entry before
_OF_THE_STEP = ("learning_rate", "grad_norm", "num_tokens", "eval_")
# datasets' own fingerprint also changes with a file's path; the hash of the tokens does not
_DATA_FACTS = ("sources", "rows", "train", "eval", "train_tokens", "order")
_ENVIRONMENT_FACTS = ("git_commit", "cuda", "gpus", "world_size")
_NOT_COMPARED = NO_EFFECT - {"eval_datasets", "resume_from_checkpoint"}  # which change what is logged


@dataclass
class RunLog:
    name: str
    log: Log  # without metrics of time and memory
    facts: dict[str, dict[str, Any]]  # what may explain a difference, by topic


def read_log(path: Path) -> RunLog:
    """Reads the folder or a checkpoint of a run by train_dpo.py or another HF Trainer."""
    run = read_run(path)
    log: Log = defaultdict(dict)
    newest: dict[str, int] = {}  # by metric, the step of its last entry
    for entry in run["log"]:
        if "train_runtime" in entry:
            continue  # the closing summary: means over the entire run
        for name, value in entry.items():
            if not any(part in name for part in _OMITTED):
                since = 0 if name.startswith(_OF_THE_STEP) else newest.get(name, 0)
                log[name][since, entry["step"]] = to_float(value)
                newest[name] = entry["step"]
    if not log:
        raise UserError(f"{path}: no step was logged; compare a run that has trained for at least logging_steps steps")
    environment = {name: run["environment"][name] for name in _ENVIRONMENT_FACTS if name in run["environment"]}
    for name, version in run["environment"].get("versions", {}).items():
        environment[f"versions.{name}"] = version
    facts = {
        "configuration": {name: value for name, value in run["config"].items() if name not in _NOT_COMPARED},
        "environment": environment,
        "data": {name: run["data"][name] for name in _DATA_FACTS if name in run["data"]},
        "reference cache": run["data"].get("reference", {}).get("train", {}),
    }
    return RunLog(str(path), log, facts)


def compare_runs(a: RunLog, b: RunLog, tolerance: float | None = None) -> dict[str, Any]:
    """Metrics, verdict and differences of two runs, as plain types. `tolerance` is relative."""
    if tolerance is None:
        is_16_bit = any(run.facts["configuration"].get("bf16") for run in (a, b))
        tolerance = 5e-2 if is_16_bit else 1e-3
    series = align_series(a, b)
    rows = [compare_metric(name, values, tolerance) for name, values in series.items()]
    beyond = [(row["beyond"], row["metric"]) for row in rows if row["beyond"] is not None]
    step, metric = min(beyond, key=lambda found: found[0], default=(None, None))
    if all(row["first"] is None for row in rows):
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


def align_series(a: RunLog, b: RunLog) -> dict[str, dict[str, list]]:
    """{metric: {"steps", "a", "b"}} of the metrics that both have logged, and of the same steps."""
    names = a.log.keys() & b.log.keys()
    series: dict[str, dict[str, list]] = {}
    for name in sorted(names, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)):
        common = sorted(a.log[name].keys() & b.log[name].keys())
        if common:
            a_values = [a.log[name][key] for key in common]
            b_values = [b.log[name][key] for key in common]
            series[name] = {"steps": [step for _, step in common], "a": a_values, "b": b_values}
    count = max([len(values["steps"]) for values in series.values()], default=0)
    if count < 2:
        remedy = "compare runs of the same logging_steps"
        raise UserError(f"{a.name} and {b.name}: {count} logged step(s) in common, 2 are needed; {remedy}")
    return series


def compare_metric(name: str, series: dict[str, list], tolerance: float) -> dict[str, Any]:
    """The largest difference of a metric, `absolute` and `relative` to the larger value; the `first` step with any
    difference, and `beyond`, the first step with a difference beyond the tolerance; None if there is no such step.

    The tolerance is relative to the larger value of the step, but at least to the metric's median size and, except for
    the gradient norm, to 1 (nat). A value that is not finite is beyond it. Shares of pairs, which jump when a margin
    crosses 0, and causes (learning rate, number of tokens) never are.
    """
    steps = series["steps"]
    a = np.array(series["a"])
    b = np.array(series["b"])
    gap = np.abs(a - b)
    larger = np.maximum(np.abs(a), np.abs(b))
    scale = np.maximum(larger, np.nanmedian(larger))
    if name != "grad_norm":
        scale = np.maximum(scale, 1.0)
    decides = not any(part in name for part in ("accurac", "learning_rate", "num_tokens"))
    differing = np.flatnonzero(gap != 0)
    beyond = np.flatnonzero(decides & ~(gap <= tolerance * scale))
    return {
        "metric": name,
        "absolute": float(gap.max()),
        "relative": float(np.divide(gap, larger, out=np.zeros_like(gap), where=larger != 0).max()),
        "first": steps[differing[0]] if len(differing) else None,
        "beyond": steps[beyond[0]] if len(beyond) else None,
    }


def find_differences(a: RunLog, b: RunLog) -> dict[str, dict[str, Any]]:
    """{topic: {name: (in A, in B)}} for the facts that both runs have and that differ."""
    differences: dict[str, dict[str, Any]] = {}
    for topic, a_facts in a.facts.items():
        values = {name: (a_facts[name], value) for name, value in b.facts[topic].items() if name in a_facts}
        differences[topic] = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    return differences


def format_comparison(result: dict[str, Any]) -> str:
    low, high, count = result["common_steps"]
    lines = [f"A  {result['runs']['a']}", f"B  {result['runs']['b']}"]
    lines += [f"{count} common steps, {low} to {high}; tolerance {result['tolerance']:g}", ""]
    table = []
    for row in result["metrics"]:
        sizes = [f"{row['absolute']:.2e}", f"{row['relative']:.2e}"]
        steps = ["-" if row[key] is None else f"step {row[key]}" for key in ("first", "beyond")]
        table.append([row["metric"], *sizes, *steps])
    headings = ["metric", "max abs diff", "max rel diff", "differs from", "beyond tolerance"]
    lines += [format_table(table, headings, align="lrrrl", indent=0), ""]
    for topic, differing in result["differences"].items():
        lines += [f"{topic}: {name}  A {a}  B {b}"[:200] for name, (a, b) in differing.items()]
    verdict = result["verdict"]["verdict"]
    if verdict == "diverging":
        verdict += f" from step {result['verdict']['step']}: {result['verdict']['metric']}"
    return "\n".join([*lines, "", f"verdict: {verdict}"])
