"""A run's curves as PNG files, and as SVG for the report."""

import io
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

matplotlib.use("Agg")

INK = "#23272e"  # text and axes; the report replaces it with the page's text colour
COLORS = ("#2f81c7", "#d9702b", "#3f9d6b")  # legible on white and on dark grey
SMOOTH_FROM = 20  # with this many logged points, a running mean is drawn over the faint raw curve
# file name: (title, {metric: label}, unit)
PANELS = {
    "loss": ("Loss", {"loss": "training"}, "nats"),
    "margin": ("Reward margin", {"rewards/margins": "training"}, "reward, chosen - rejected"),
    "accuracy": ("Reward accuracy", {"rewards/accuracies": "training"}, "share of pairs"),
    "rewards": (
        "Rewards",
        {f"rewards/{name}": name for name in ("chosen", "rejected", "average")},
        "beta x log-prob over the reference's",
    ),
    "entropy": ("Entropy", {"entropy": "training"}, "nats per token"),
    "grad_norm": ("Gradient norm", {"grad_norm": "training"}, "L2 norm, before clipping"),
    "learning_rate": ("Learning rate", {"learning_rate": "training"}, ""),
    "perf_pairs_per_second": ("Pairs per second", {"perf/pairs_per_second": "training"}, "all ranks"),
    "perf_mfu": ("MFU", {"perf/mfu": "training"}, "share of the GPU's peak FLOPs"),
    "perf_peak_memory_gib": ("Peak memory", {"perf/peak_memory_gib": "training"}, "GiB"),
}
STYLE = rc_params_from_file(Path(__file__).with_name("templates") / "plots.mplstyle", use_default_template=False)


def draw_curves(facts: dict[str, Any], folder: Path, panels: Collection[str] | None = None) -> list[tuple[str, str]]:
    """Writes `folder`/<panel>.png for each of `panels` that has a logged value; returns [(title, SVG element)].

    `facts`: of read_run; in its log, held-out metrics start with `eval_`, and NaN and inf leave a gap. The default for
    `panels` is all of PANELS.
    """
    log = facts["log"]
    chosen = {name: PANELS[name] for name in panels or PANELS}
    svgs = []
    with matplotlib.rc_context(STYLE):
        for name, (title, metrics, unit) in chosen.items():
            figure = Figure(figsize=(4.4, 2.9), layout="constrained")
            axes = figure.add_subplot()
            for color, (metric, label) in zip(COLORS, metrics.items(), strict=False):
                _draw_training(axes, log, metric, label, color)
            if len(metrics) == 1:
                _draw_held_out(axes, log, *metrics)
            if not axes.lines:
                continue
            for start in facts["environment"].get("starts", [])[1:]:
                if start["step"]:
                    axes.axvline(start["step"], color=INK, linewidth=0.5, alpha=0.5)
            limit = facts["config"].get("max_grad_norm")
            if name == "grad_norm" and limit:
                axes.axhline(limit, color=INK, linewidth=0.8, linestyle=":", label="clipped above")
                title += f", {np.mean(_read_series(log, name)[1] > limit):.0%} of steps clipped"
            if name.startswith("perf_"):  # otherwise the rounding of a constant would fill the axis
                axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
            axes.set(title=title, xlabel="optimizer step", ylabel=unit)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=6))
            if len(axes.get_legend_handles_labels()[0]) > 1:
                figure.legend(loc="outside lower left", ncols=4, handlelength=1.4, columnspacing=1)
            folder.mkdir(exist_ok=True)
            figure.savefig(folder / f"{name}.png", facecolor="white")
            svgs.append((title, to_svg(figure, name)))
    return svgs


def _draw_training(axes: Axes, log: list[dict[str, Any]], metric: str, label: str, color: str) -> None:
    """Draws the logged values as a line; if there are many, a running mean over a faint line."""
    steps, values = _read_series(log, metric)
    if not np.isfinite(values).any():
        return
    if len(values) >= SMOOTH_FROM and metric != "learning_rate":
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.6)
        values = running_mean(values, max(5, len(values) // 40 * 2 + 1))
    marker, line = (".", "") if len(values) < 3 else ("", "-")  # two points are no trend
    axes.plot(steps, values, color=color, label=label, marker=marker, linestyle=line)


def _draw_held_out(axes: Axes, log: list[dict[str, Any]], metric: str) -> None:
    """The values of the held-out pairs, and of each set of eval_datasets, as dashes with markers."""
    pattern = rf"eval_(?:([\w-]+)_)?{re.escape(metric)}"
    names = {key for entry in log for key in entry if re.fullmatch(pattern, key)}
    for i, name in enumerate(sorted(names, key=len)):
        label = re.sub(pattern, r"\1", name) or "held out"
        color = COLORS[(i + 1) % len(COLORS)]
        steps, values = _read_series(log, name)
        line = "--" if len(values) > 2 else ""
        axes.plot(steps, values, label=label, color=color, marker="o", markersize=3.5, linestyle=line)


def _read_series(log: list[dict[str, Any]], metric: str) -> tuple[list[int], np.ndarray]:
    """Steps and values; a value that is not finite becomes NaN, which leaves a gap in the line."""
    entries = [entry for entry in log if metric in entry]
    values = np.array([entry[metric] for entry in entries], dtype=float)
    return [entry["step"] for entry in entries], np.where(np.isfinite(values), values, np.nan)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of the finite values within `window` (odd) points; a gap stays a gap."""
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), np.ones(window), mode="same")
    counts = np.convolve(finite.astype(float), np.ones(window), mode="same")
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an SVG element for a page: transparent, in the page's text colour, ids unique to the panel."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace(INK, "currentColor")
