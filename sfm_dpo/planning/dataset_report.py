"""The analysis of a dataset (dataset.py) as text for a terminal and as a plot."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

from sfm_dpo.common.files import format_table
from sfm_dpo.data.answers import tabulate_sides
from sfm_dpo.planning.length_advice import PERCENTILES
from sfm_dpo.report.plots import COLORS, INK, STYLE

NOTE = (
    "*: recommended. untruncated: pairs that lose no token. no signal: both responses are identical after truncation. "
    "dropped: no response token is left or, with overlong: drop, the pair is longer. tokens and FLOPs: per epoch, "
    "without padding. step time: padding-free, relative to the recommendation."
)
HEADINGS = "max_length,max_prompt_length,untruncated,tokens kept,no signal,dropped,tokens,FLOPs,step time".split(",")
LINES: dict[str, tuple[str, dict[str, Any]]] = {  # curve: (label, style)
    "total": ("prompt + longer", {"color": COLORS[0], "linewidth": 1.8}),
    "prompt": ("prompt", {"color": INK, "linestyle": ":"}),
    "chosen": ("chosen", {"color": COLORS[2]}),
    "rejected": ("rejected", {"color": COLORS[1]}),
}


def build_tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """For each table's title, its rows of cells; the first row holds the headings."""
    sides = result["percentiles"]
    percentiles = [["percentile", *(LINES[side][0] for side in sides)]]
    for q in PERCENTILES:
        tokens = [f"{values[str(q)]:,}" for values in sides.values()]
        percentiles.append(["longest" if q == 100 else f"{q}%", *tokens])
    percentiles.append(["mean", *(f"{values['mean']:,.0f}" for values in sides.values())])
    candidates = [HEADINGS]
    for row in result["candidates"]:
        mark = "* " if row["max_length"] == result["recommendation"]["max_length"] else ""
        prompt_length = row["max_prompt_length"]
        cells = [f"{mark}{row['max_length']:,}", f"{prompt_length:,}" if prompt_length else "not needed"]
        cells += [f"{row['untruncated']:.1%}", f"{row['tokens_kept']:.1%}"]
        cells += [f"{row['no_signal']:,}", f"{row['dropped']:,}", f"{row['tokens'] / 1e6:,.2f} M"]
        candidates.append([*cells, f"{row['flops']:.2e}", f"x {row['relative_time']:.2f}"])
    return {
        "Tokens": percentiles,
        "What each max_length keeps and costs": candidates,
        "How chosen and rejected answers differ": tabulate_sides(result["sides"]),
    }


def format_analysis(result: dict[str, Any]) -> str:
    """The analysis as text for a terminal; it ends with lines for a recipe."""
    findings = [f"  {finding['level']}: {finding['text']}" for finding in result["findings"]]
    best = result["recommendation"]
    pairs = f"{result['pairs']:,} of {result['usable']:,} usable pairs"
    parts = [f"{' + '.join(result['dataset'])}: {pairs}, tokens of {result['model']}"]
    for title, rows in build_tables(result).items():
        parts.append(f"{title}\n{format_table(rows[1:], rows[0], 'r')}")
    parts += [
        NOTE,
        "\n".join(["Findings", *findings]),
        f"Recommendation: max_length {best['max_length']:,}\n{best['reason']}",
        f"max_length: {best['max_length']}\nmax_prompt_length: {best['max_prompt_length'] or 'null  # not needed'}",
    ]
    return "\n\n".join(parts)


def draw_lengths(result: dict[str, Any], path: Path) -> None:
    """Draws the share of the pairs up to each length, at the percentiles, in the format of the file's suffix."""
    shares = [q / 100 for q in PERCENTILES]
    best = result["recommendation"]["max_length"]
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for side, (label, style) in LINES.items():
            tokens = [result["percentiles"][side][str(q)] for q in PERCENTILES]
            axes.plot(tokens, shares, label=label, **style)
        axes.axvline(best, color=INK, linewidth=1.1, linestyle="--", label=f"recommended: {best:,}")
        axes.set(title="Lengths", xlabel="tokens", ylabel="share of pairs up to this length", ylim=(0, 1.04))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        figure.legend(loc="outside lower left", ncols=3)  # inside, every corner may hold a curve
        figure.savefig(path, facecolor="white")
