"""Curves of a run as PNG files and as SVG for the report, and those of two runs compared."""

import io
import json
import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sfm_dpo.run.reader import to_float

matplotlib.use("Agg")

INK = "#23272e"  # text and axes; the report replaces it by the page's own text colour
COLORS = ("#2f81c7", "#d9702b", "#3f9d6b")  # legible on white and on dark grey
ALARM = "#c0392b"
SMOOTH_FROM = 120  # logged points from which a running mean is drawn over the faint raw curve
# file name: (title, {metric: label}, unit)
PANELS = {
    "loss": ("Loss", {"loss": "loss"}, "nats"),
    "margin": ("Reward margin", {"rewards/margins": "chosen - rejected"}, "reward"),
    "accuracy": ("Reward accuracy", {"rewards/accuracies": "chosen above rejected"}, "share of pairs"),
    "rewards": (
        "Rewards",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/average": "average"},
        "reward",
    ),
    "logps": ("Log-probability", {"logps/chosen": "chosen", "logps/rejected": "rejected"}, "nats, sum of an answer"),
    "entropy": ("Entropy", {"entropy": "entropy"}, "nats per token"),
    "grad_norm": ("Gradient norm", {"grad_norm": "gradient norm"}, "L2 norm, before clipping"),
    "learning_rate": ("Learning rate", {"learning_rate": "learning rate"}, "learning rate"),
}
STYLE = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.25,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-3, 5),
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.1,
    "savefig.dpi": 160,
    "svg.fonttype": "none",  # text stays text: small, sharp, and in the page's colour
    "svg.hashsalt": "sfm-dpo",
}


def draw_curves(
    log: list[dict[str, Any]],
    config: dict[str, Any],
    restarts: list[int],
    folder: Path,
    alarms: Sequence[tuple[int, str]] = (),
    panels: Collection[str] | None = None,
) -> list[tuple[str, str]]:
    """Writes `folder`/<panel>.png for every panel with a logged value; returns [(title, SVG element)].

    Args:
        log: transformers' log_history; held-out metrics carry the prefix `eval_`. NaN and inf leave a gap.
        config: resolved configuration; `loss_type` decides whether ln 2 is where the loss starts.
        restarts: steps marked with a vertical line.
        alarms: (step it began, signal) of the guard's findings, marked too.
        panels: names of those to draw; by default all of PANELS, and one for each perf/ metric.
    """
    chosen = {name: PANELS[name] for name in panels or PANELS}
    for key in sorted({key for entry in log for key in entry if key.startswith("perf/") and not panels}):
        chosen[re.sub(r"\W", "_", key)] = (key, {key: key}, key.removeprefix("perf/").replace("_", " "))
    svgs = []
    with matplotlib.rc_context(STYLE):
        for name, (title, metrics, unit) in chosen.items():
            figure = Figure(figsize=(4.4, 2.9), layout="constrained")
            axes = figure.add_subplot()
            if not _draw_metrics(axes, name, metrics, log, list(json.loads(config.get("eval_datasets") or "{}"))):
                continue
            axes.set(title=title, xlabel="optimizer step", ylabel=unit)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            _draw_references(axes, name, config)
            for i, step in enumerate(restarts):
                axes.axvline(step, color=INK, linewidth=0.7, linestyle=":", label="restart" if i == 0 else None)
            for step, signal in alarms:
                axes.axvline(step, color=ALARM, linewidth=0.9, linestyle="-.", label=f"guard: {signal}")
            low, high = axes.get_ylim()
            if high - low < 1e-3 * abs(high):  # a constant: no axis that shows its rounding
                axes.set_ylim(*sorted((0.9 * high, 1.1 * high)))
            if len(axes.get_legend_handles_labels()[0]) > 1:
                figure.legend(loc="outside lower left", ncols=4, handlelength=1.4, columnspacing=1)
            folder.mkdir(exist_ok=True)
            figure.savefig(folder / f"{name}.png", facecolor="white")
            figure.set_layout_engine("none")  # it is laid out; each further drawing would do it again
            svgs.append((title, to_svg(figure, name)))
    return svgs


def _draw_metrics(axes, name: str, metrics: dict[str, str], log: list[dict[str, Any]], sets: list[str]) -> bool:
    """Draws training values as lines (a running mean over many), held-out ones as dashes; False if there are none.
    `sets`, the names of eval_datasets, are drawn where there is a single metric."""
    several, window, held_out = len(metrics) > 1, 1, False
    dashes: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 0.9, "marker": "o", "markersize": 3.5}
    dashes["markerfacecolor"] = "none"
    for color, (metric, label) in zip(COLORS, metrics.items(), strict=False):
        steps, values = _read_series(log, metric)
        if np.isfinite(values).any():
            noisy = len(values) >= SMOOTH_FROM and name not in ("learning_rate", "perf_peak_memory_gib")
            window = len(values) // 40 * 2 + 1 if noisy else 1
            if window > 1:
                axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.6)
            smooth, marker = _running_mean(values, window), "." * (len(values) < 3)
            axes.plot(steps, smooth, color=color, label=label if several else "training", marker=marker)
        steps, values = _read_series(log, f"eval_{metric}")
        if np.isfinite(values).any():
            held_out = True
            named = {"color": color} if several else {"color": COLORS[1], "label": "held out"}
            axes.plot(steps, values, **named, **dashes)
        for i, held_out_set in enumerate([] if several else sets):
            style = dashes | {"color": COLORS[(i + 2) % 3], "marker": "s^vD"[i % 4]}
            axes.plot(*_read_series(log, f"eval_{held_out_set}_{metric}"), label=held_out_set, **style)
    if several and held_out:
        axes.plot([], [], color=INK, label="held out", **dashes)
    if window > 1:
        axes.set_title(f"line: mean of {window} logged values", loc="right", fontsize=7.5, fontweight="normal")
    return bool(axes.lines)


def _draw_references(axes, name: str, config: dict[str, Any]) -> None:
    line: dict[str, Any] = {"color": INK, "linewidth": 0.7, "linestyle": "--", "alpha": 0.7}
    if name == "loss" and config.get("loss_type") in (["sigmoid_norm"], ["sigmoid"]):
        axes.axhline(math.log(2), label="ln 2: policy = reference", **line)
    if name in ("margin", "rewards"):
        axes.axhline(0, color=INK, linewidth=0.6, alpha=0.5)
    if name == "accuracy":
        axes.axhline(0.5, label="chance", **line)
        axes.set_ylim(-0.03, 1.03)


def _read_series(log: list[dict[str, Any]], metric: str) -> tuple[list[int], np.ndarray]:
    """Steps and values; what is no finite number becomes NaN, which leaves a gap in the line."""
    entries = [entry for entry in log if metric in entry]
    values = np.array([to_float(entry[metric]) for entry in entries])
    return [entry["step"] for entry in entries], np.where(np.isfinite(values), values, np.nan)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of the finite values within `window` (odd) points; a gap stays a gap."""
    ones = np.ones(window)
    finite = np.isfinite(values)
    sums, counts = (np.convolve(x, ones, mode="same") for x in (np.where(finite, values, 0.0), finite.astype(float)))
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page: transparent, in the page's text colour, ids unique to the panel."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace(INK, "currentColor")


# Drawn where they were logged: the metrics that a study of two runs looks at first
_COMPARED = ("loss", "logps/chosen", "logps/rejected", "rewards/margins", "grad_norm")


def draw_comparison(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG (or what the suffix says): above the curves of A and B, below |A - B| on a logarithmic scale.

    Args:
        result: from compare.runs.
    """
    rows = {row["metric"]: row for row in result["metrics"]}
    names = [name for name in _COMPARED if name in rows] or list(rows)[:4]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1 + 3.3 * len(names), 5.0), layout="constrained")
        grid = figure.subplots(2, len(names), sharex="col", squeeze=False, height_ratios=(3, 2))
        for (above, below), name in zip(grid.T, names, strict=True):
            series, row = result["series"][name], rows[name]
            steps, a, b = series["steps"], np.array(series["a"]), np.array(series["b"])
            marker = "." if len(steps) < 40 else ""
            above.plot(steps, a, color=COLORS[0], label="A", marker=marker, markersize=5)
            above.plot(steps, b, color=COLORS[1], label="B", marker=marker, markersize=3, linestyle=(0, (4, 2)))
            above.set_title(name)
            gap = np.where(a == b, np.nan, np.abs(a - b))  # nothing is drawn where they are equal
            below.semilogy(steps, gap, color=INK, marker=".", markersize=4, linewidth=0.8)
            largest = (
                f"max: {row['absolute']:.2e}, relative {row['relative']:.2e}" if row["absolute"] else "no difference"
            )
            below.set_title(largest, fontsize=7.5, fontweight="normal")
            below.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            below.set_xlabel("optimizer step")
        grid[0, 0].set_ylabel("value")
        grid[1, 0].set_ylabel("|A - B|")
        if (step := result["verdict"]["step"]) is not None:
            for axes in grid.flat:
                axes.axvline(step, color=ALARM, linewidth=0.9, linestyle="-.", label="first beyond tolerance")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        labels = [f"{label}: {result['runs'][label.lower()]}" if label in ("A", "B") else label for label in labels]
        figure.legend(handles, labels, loc="outside lower left", ncols=1 if max(map(len, labels)) > 50 else 3)
        figure.savefig(path, facecolor="white")
