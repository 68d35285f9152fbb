"""How does the analysis of a data set look? analysis.py's dict as text, picture and page."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from sfm_dpo.curves import COLORS, INK, STYLE, to_svg
from sfm_dpo.data import DROP_REASONS
from sfm_dpo.lengths import BATCH_SIZES, MEMORY_BATCH, PERCENTILES
from sfm_dpo.run_dir import write_atomically

# ---- tables, for text and page alike: a list of rows of cells, the first being the heading


def percentile_table(result: dict[str, Any]) -> list[list[str]]:
    sides = result["percentiles"]
    rows = [["percentile", *("prompt + longer" if name == "total" else name for name in sides)]]
    for q in PERCENTILES:
        cells = []
        for side in sides.values():
            cell = side[str(q)]
            interval = " ({:,}-{:,})".format(*cell["interval"]) if "interval" in cell else ""
            cells.append(f"{cell['tokens']:,}{interval}")
        rows.append(["longest" if q == 100 else f"{q}%", *cells])
    return [*rows, ["mean", *(f"{side['mean']:,.0f}" for side in sides.values())]]


def coverage_table(result: dict[str, Any]) -> list[list[str]]:
    rows = ["max_length,untouched,tokens kept,cut alike,dropped,tokens/epoch,FLOPs/epoch,step time,memory,".split(",")]
    for row in result["candidates"]:
        flops = "-" if row["flops"] is None else f"{row['flops']:.2e}"
        mark = "<- recommended" if row["max_length"] == result["recommendation"]["max_length"] else ""
        rows.append(
            [
                f"{row['max_length']:,}",
                f"{row['untouched']:.1%}",
                f"{row['tokens_kept']:.1%}",
                f"{row['no_signal']:,}",
                f"{row['dropped']:,}",
                f"{row['tokens'] / 1e6:,.2f} M",
                flops,
                f"x {row['relative_time']:.2f}",
                f"x {row['relative_memory']:.2f}",
                mark,
            ]
        )
    return rows


def padding_table(result: dict[str, Any]) -> list[list[str]]:
    kinds = {"stock": "padded", "grouped": "grouped"}
    rows = [["max_length", *(f"{name} {size}" for name in kinds.values() for size in BATCH_SIZES), "padding_free"]]
    for row in result["candidates"]:
        shares = [row["padding"][str(size)][kind] for kind in kinds for size in BATCH_SIZES]
        rows.append([f"{row['max_length']:,}", *(f"{share:.0%}" for share in shares), "0%"])
    return rows


NOTES = {
    "coverage": (
        "untouched: pairs of which no token is cut. tokens kept: of all response tokens. cut alike: pairs whose responses "
        "are cut to the same tokens. dropped: pairs whose prompt fills max_length. tokens/epoch: real tokens, both "
        "sequences. FLOPs/epoch: useful ones (sfm_dpo/throughput.py), 3 forwards for training and 1 for the reference. "
        "step time and memory: relative to the recommendation, padding-free; memory is that of the activations of the "
        f"longest {MEMORY_BATCH} pairs."
    ),
    "padding": (
        "Share of the computed tokens that is padding, by pairs per device. padded: TRL's batches in random order (exact "
        "mean). grouped: train_sampling_strategy group_by_length (one seeded order)."
    ),
}


def yaml_lines(result: dict[str, Any]) -> str:
    """What to paste into a recipe."""
    best = result["recommendation"]
    return (
        f"max_length: {best['max_length']}  # leaves {best['untouched']:.1%} of the pairs whole, keeps "
        f"{best['tokens_kept']:.1%} of the response tokens\n"
        f"max_prompt_length: {best['max_prompt_length']}  # a longer prompt keeps its end: {best['prompts_cut']:,} pairs"
    )


def text(result: dict[str, Any]) -> str:
    """The whole analysis for a terminal."""
    shown = result["example"]
    boundary = [
        f"  {side:<8}  ...{''.join(map(_visible, shown['prompt']['last']))} || "
        f"{''.join(map(_visible, shown[side]['first']))}...   ends in ...{''.join(map(_visible, shown[side]['last']))}"
        for side in ("chosen", "rejected")
    ]
    parts = [
        f"{heading(result)}\n{_drop_lines(result)}".rstrip(),
        f"tokens{' (95% interval of the percentile)' if result['sampled'] else ''}\n"
        + _aligned(percentile_table(result)),
        "what each max_length keeps and costs\n" + _aligned(coverage_table(result)) + "\n" + _wrap(NOTES["coverage"]),
        "padding\n" + _aligned(padding_table(result)) + "\n" + _wrap(NOTES["padding"]),
        "findings\n" + "\n".join(_wrap(f"{f['level']}: {f['text']}") for f in result["findings"]),
        f"example: the pair of median length (number {shown['row']:,}); || is where training starts\n"
        + "\n".join(boundary),
        "\n".join(
            f"  {side}, {shown[side]['tokens']:,} tokens{', not trained' if side == 'prompt' else ''}\n"
            + "\n".join(f"    | {line}" for line in shown[side]["text"].splitlines())
            for side in ("prompt", "chosen", "rejected")
        ),
        f"recommendation: max_length {result['recommendation']['max_length']:,}\n"
        + _wrap(result["recommendation"]["reason"])
        + "\n\n"
        + yaml_lines(result),
    ]
    return "\n\n".join(parts)


def heading(result: dict[str, Any]) -> str:
    of = f", a sample of {result['usable']:,}" if result["sampled"] else ""
    return f"{' + '.join(result['dataset'])}: {result['pairs']:,} pairs{of}, tokens of {result['model']}" + (
        f" (limit {result['recommendation']['limit']:,})" if result["recommendation"]["limit"] else ""
    )


def drops(result: dict[str, Any]) -> list[str]:
    """Rows that cannot be used, one line a reason."""
    return [f"{n:,} of {result['rows']:,} rows dropped: {DROP_REASONS[key]}" for key, n in result["dropped"].items()]


def _drop_lines(result: dict[str, Any]) -> str:
    return "\n".join(f"  {line}" for line in drops(result))


def _visible(token: str) -> str:
    return token.replace("\n", "\\n").replace("\t", "\\t")


def _aligned(table: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join("  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table)


def _wrap(line: str) -> str:
    return textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="  ")


# ---- picture and page


def draw(result: dict[str, Any]) -> Figure:
    """Distributions of prompt, chosen and rejected; share of pairs within max_length, with the recommendation."""
    best, curves = result["recommendation"], result["curves"]
    with rc_context(STYLE):
        figure = Figure(figsize=(9.2, 3.5), layout="constrained")
        left, right = figure.subplots(1, 2)
        centres = np.sqrt(np.multiply(curves["edges"][:-1], curves["edges"][1:]))
        for color, (name, counts) in zip((COLORS[2], COLORS[0], COLORS[1]), curves["pairs"].items(), strict=True):
            density = np.array(counts) / np.diff(np.log2(curves["edges"])) / result["pairs"]
            left.plot(centres, density, color=color, label=name)
            left.fill_between(centres, density, color=color, alpha=0.15, linewidth=0)
        left.set_title("How long they are", loc="left", fontsize=10, fontweight="bold")
        left.set_ylabel("share of pairs per doubling of length")
        left.set_ylim(bottom=0)
        left.legend(frameon=False, fontsize=8)
        right.plot(curves["length"], curves["coverage"], color=COLORS[0])
        right.axhline(best["min_coverage"], color=INK, linewidth=0.7, linestyle=":")
        right.axvline(best["max_length"], color=COLORS[1], linewidth=1.1, linestyle="--")
        totals = {row["max_length"]: row["untouched"] for row in result["candidates"]}
        right.plot(list(totals), list(totals.values()), "o", color=COLORS[0], markersize=3.5)
        for length, share in totals.items():
            if share < 0.9985 or length == best["max_length"]:
                right.annotate(
                    f"{share:.1%}", (length, share), (5, -9), textcoords="offset points", fontsize=7.5, color=INK
                )
        right.set_title(
            f"Pairs whole within max_length: {best['untouched']:.1%} at {best['max_length']:,} (recommended)",
            loc="left",
            fontsize=10,
            fontweight="bold",
        )
        right.set_ylim(0, 1.04)
        right.set_ylabel("share of pairs")
        right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            axes.grid(axis="y", linewidth=0.4, alpha=0.25, color=INK)
        ends = (min(curves["length"][0], min(totals)), max(*totals, curves["length"][-1]) * 1.5)
        right.set_xlim(ends)
        for axes, low, high in ((left, curves["edges"][0], curves["edges"][-1]), (right, *ends)):
            powers = range(int(np.ceil(np.log2(low))), int(np.log2(high)) + 1)
            axes.set_xticks([2.0**p for p in powers][:: 1 + len(powers) // 8], minor=False)
        left.set_xlabel("tokens")
        right.set_xlabel("max_length: prompt + longer response, tokens")
    return figure


def write_plot(result: dict[str, Any], path: Path) -> None:
    """The picture on white, legible in a README; the format follows the name's ending."""
    with rc_context(STYLE):
        draw(result).savefig(path, dpi=160, facecolor="white")


def write_page(result: dict[str, Any], path: Path) -> None:
    """One self-contained page: nothing loaded, no script; light, dark, narrow, wide."""
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).get_template("lengths.html.jinja")
    with rc_context(STYLE):
        picture = to_svg(draw(result), "lengths")
    page = template.render(
        result,
        heading=heading(result),
        drops=drops(result),
        picture=picture,
        tables=[
            ("Tokens", percentile_table(result), "In brackets: 95% interval." if result["sampled"] else ""),
            ("What each max_length keeps and costs", coverage_table(result), NOTES["coverage"]),
            ("Padding", padding_table(result), NOTES["padding"]),
        ],
        yaml_lines=yaml_lines(result),
    )
    write_atomically(path, page)
