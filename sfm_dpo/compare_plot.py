"""How do two runs look beside each other? Two curves a metric, and their difference below."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sfm_dpo.curves import ALARM, COLORS, INK, STYLE

# What is drawn where it was logged: the study's three, and what tells a reference from a forward
_DRAWN = ("train/loss", "logps/chosen", "logps/rejected", "rewards/margins", "grad_norm")


def draw_comparison(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG (or what the suffix says): above the curves of A and B, below |A - B| on a logarithmic scale.

    Args:
        result: from compare.compare.
    """
    rows = {row["metric"]: row for row in result["metrics"]}
    shown = [name for name in _DRAWN if name in rows] or list(rows)[:4]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1 + 3.3 * len(shown), 5.0), layout="constrained")
        grid = figure.subplots(2, len(shown), sharex="col", squeeze=False, height_ratios=(3, 2))
        for (above, below), name in zip(grid.T, shown, strict=True):
            _draw_metric(above, below, rows[name], result["series"][name])
        grid[0, 0].set_ylabel("value")
        grid[1, 0].set_ylabel("|A - B|")
        found = result["verdict"]
        if found["step"] is not None:
            for axes in grid.flat:
                axes.axvline(found["step"], color=ALARM, linewidth=0.9, linestyle="-.", label="first beyond tolerance")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        names = {"A": f"A: {result['runs']['a']}", "B": f"B: {result['runs']['b']}"}
        figure.legend(
            handles,
            [names.get(label, label) for label in labels],
            loc="outside lower left",
            ncols=1 if max(map(len, names.values())) > 50 else 3,
            frameon=False,
            fontsize=8,
        )
        figure.savefig(path, dpi=160, facecolor="white")


def _draw_metric(above, below, row: dict[str, Any], series: dict[str, list]) -> None:
    steps, a, b = series["steps"], np.array(series["a"]), np.array(series["b"])
    marker = "." if len(steps) < 40 else ""
    above.plot(steps, a, color=COLORS[0], label="A", marker=marker, markersize=5)
    above.plot(steps, b, color=COLORS[1], label="B", marker=marker, markersize=3, linestyle=(0, (4, 2)))
    above.set_title(row["metric"], loc="left", fontsize=10, fontweight="bold")
    below.set_title(f"max: {row['absolute']:.2e}, relative {row['relative']:.2e}", loc="left", fontsize=7.5)
    above.ticklabel_format(axis="y", useOffset=False, scilimits=(-3, 5))
    gap = np.abs(a - b)
    if gap.any():
        below.set_yscale("log")
        below.set_ylim(gap[gap > 0].min() / 10, gap.max() * 10)  # a constant difference has no range of its own
        below.plot(steps, np.where(gap > 0, gap, np.nan), color=INK, marker=".", markersize=4, linewidth=0.8)
    else:
        blank = {"facecolor": "white", "edgecolor": "none"}
        below.text(0.5, 0.5, "no difference", ha="center", transform=below.transAxes, fontsize=8, bbox=blank)
        below.set_yticks([])
    for axes in (above, below):
        axes.grid(axis="y", linewidth=0.4, alpha=0.25, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    below.set_xlabel("optimizer step")
