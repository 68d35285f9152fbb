"""The analysis of a dataset (dataset.py) as text for a terminal, as a picture and as an HTML page."""

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from sfm_dpo.common.files import write_atomically
from sfm_dpo.common.tables import format_table
from sfm_dpo.data.preferences import DROP_REASONS
from sfm_dpo.planning.lengths import BATCH_SIZES, MEMORY_BATCH, PERCENTILES
from sfm_dpo.report.page import render_page
from sfm_dpo.report.plots import COLORS, INK, STYLE, to_svg

NOTES = {  # under the tables, by their titles; docs/lengths.md says more
    "what each max_length keeps and costs": (
        "*: recommended. prompt: max_prompt_length, where prompts leave no room. untouched: pairs of which no token "
        "is cut. cut alike: both responses cut to the same tokens. dropped: the prompt fills max_length. tokens and "
        f"FLOPs: of an epoch, without padding. step time and memory (activations of the longest {MEMORY_BATCH} "
        "pairs): padding-free, relative to the recommendation. hours and GiB, with --gpu: this recipe under ZeRO-2, "
        "at the efficiencies of scripts/plan.py."
    ),
    "padding": (
        "Share of the computed tokens, by pairs per device. padded: random order, as TRL (exact mean). grouped: "
        "train_sampling_strategy group_by_length (one seeded order). padding_free has none."
    ),
    "which turns are trained": (
        "Trained is what follows the messages that both sides share: the last assistant turn, or several messages "
        "where tools are called. All before it is prompt. differ earlier: rows whose sides differ before the last "
        "assistant turn; they are dropped (prompts_differ)."
    ),
    "filters": "What each would leave out, alone; all are off by default (docs/filters.md).",
    "what looks wrong": "By the texts alone: docs/filters.md says what these checks miss and name falsely.",
}


def build_tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Rows of cells, the first of them the headings, by the table's title; * marks the recommended max_length."""
    sides, best = result["percentiles"], result["recommendation"]["max_length"]
    percentiles = [["percentile", *(name.replace("total", "prompt + longer") for name in sides)]]
    for q in PERCENTILES:
        points = [values[str(q)] for values in sides.values()]
        intervals = [" ({:,}-{:,})".format(*point["interval"]) if "interval" in point else "" for point in points]
        cells = [f"{point['tokens']:,}{interval}" for point, interval in zip(points, intervals, strict=True)]
        percentiles.append(["longest" if q == 100 else f"{q}%", *cells])
    percentiles.append(["mean", *(f"{values['mean']:,.0f}" for values in sides.values())])
    coverage = ["max_length,prompt,untouched,tokens kept,cut alike,dropped,tokens,FLOPs,step time,memory".split(",")]
    if cluster := result.get("cluster"):
        coverage[0] += [f"hours on {cluster['gpus']} {cluster['gpu']}", "GiB a GPU"]
    kinds = [
        (name, key, str(size)) for name, key in (("padded", "stock"), ("grouped", "grouped")) for size in BATCH_SIZES
    ]
    padding = [["max_length", *(f"{name} {size}" for name, _, size in kinds)]]
    for row in result["candidates"]:
        max_length = f"{'* ' if row['max_length'] == best else ''}{row['max_length']:,}"
        padding.append([max_length, *(f"{row['padding'][size][key]:.0%}" for _, key, size in kinds)])
        coverage.append(
            [
                max_length,
                f"{row['max_prompt_length'] or '-'}",
                f"{row['untouched']:.1%}",
                f"{row['tokens_kept']:.1%}",
                f"{row['no_signal']:,}",
                f"{row['dropped']:,}",
                f"{row['tokens'] / 1e6:,.2f} M",
                "-" if row["flops"] is None else f"{row['flops']:.2e}",
                f"x {row['relative_time']:.2f}",
                f"x {row['relative_memory']:.2f}",
            ]
            + (["{:.1f}-{:.1f}".format(*row["hours"]), f"{row['gpu_memory'] / 2**30:.0f}"] if cluster else [])
        )
    return {
        "tokens (in brackets: 95% interval of the percentile)" if result["sampled"] else "tokens": percentiles,
        "what each max_length keeps and costs": coverage,
        "padding": padding,
        "which turns are trained": [
            ["source", "pairs", "several user turns", "system prompt", "tools", "several trained", "differ earlier"],
            *([row["source"], *(f"{n:,}" for n in list(row.values())[1:])] for row in result["turns"]["sources"]),
        ],
        "filters": [["fields of a recipe", "pairs left out", "share"]]
        + [
            [row["setting"], f"{row['pairs']:,}", f"{row['pairs'] / result['pairs']:.2%}"] for row in result["filters"]
        ],
        **tabulate_contamination(result),
        "what looks wrong": [["what", "pairs", "share", "in chosen", "in rejected"]]
        + [
            [row["text"], f"{row['pairs']:,}", f"{row['pairs'] / result['pairs']:.2%}"]
            + [f"{row[side]:,}" for side in ("chosen", "rejected")]
            for row in result["faults"]
        ],
    }


def format_recipe_lines(result: dict[str, Any]) -> str:
    """What to paste into a recipe."""
    best = result["recommendation"]
    if best["max_prompt_length"]:
        prompts = (
            f"max_prompt_length: {best['max_prompt_length']}  # cuts the start of {best['prompts_cut']:,} prompts: "
            f"{best['saved']:,} would leave no room for a response, {best['whole_cut']:,} are of pairs that fit whole"
        )
    else:
        prompts = "# max_prompt_length: " + (
            f"none; {best['dropped']:,} prompts leave no room for a response, and their pairs are dropped"
            if best["dropped"]
            else "not needed, each prompt leaves room for a response"
        )
    return (
        f"max_length: {best['max_length']}  # leaves {best['untouched']:.1%} of the pairs whole, keeps "
        f"{best['tokens_kept']:.1%} of the response tokens\n{prompts}"
    )


def format_analysis(result: dict[str, Any]) -> str:
    """The whole analysis for a terminal."""
    example, best = result["example"], result["recommendation"]

    def wrap(line: str) -> str:
        return textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="  ")

    texts = (
        f"  {side}, {example[side]['tokens']:,} tokens\n"
        + textwrap.indent(example[side]["text"].rstrip("\n"), "    | ", lambda line: True)
        for side in ("prompt", "chosen", "rejected")
    )
    tables = (
        "\n".join([title, format_table(rows[1:], rows[0], "r"), wrap(NOTES.get(title, ""))]).rstrip()
        for title, rows in build_tables(result).items()
    )
    parts = [
        "\n  ".join([format_heading(result), *list_drops(result)]),
        *tables,
        *("\n".join([title, *lines]) for title, lines in list_examples(result).items() if lines),
        "\n".join(["findings", *(wrap(f"{f['level']}: {f['text']}") for f in result["findings"])]),
        "\n".join(
            [f"example: the pair of median length (number {example['row']:,}); the prompt is not trained", *texts]
        ),
        f"recommendation: max_length {best['max_length']:,}\n{wrap(best['reason'])}",
        format_recipe_lines(result),
    ]
    return "\n\n".join(parts)


def format_heading(result: dict[str, Any]) -> str:
    of, limit = f", a sample of {result['usable']:,}" if result["sampled"] else "", result["recommendation"]["limit"]
    heading = f"{' + '.join(result['dataset'])}: {result['pairs']:,} pairs{of}, tokens of {result['model']}"
    return heading + (f" (limit {limit:,})" if limit else "")


def tabulate_contamination(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The table of what pairs share with evaluation sets, by its title; empty where none was given."""
    if "contamination" not in result:
        return {}
    rows = [["evaluation set", "rows", "too short", "in pairs", "share", "pairs", "share"]]
    for found in result["contamination"]["sets"]:
        shares = (f"{found['set_rows'] / found['rows']:.2%}", f"{found['pairs'] / result['pairs']:.2%}")
        counts = [f"{found[name]:,}" for name in ("rows", "short", "set_rows", "pairs")]
        rows.append([found["set"], *counts[:3], shares[0], counts[3], shares[1]])
    return {f"n-grams of {result['contamination']['ngram']} words in common with evaluation sets": rows}


def list_examples(result: dict[str, Any]) -> dict[str, list[str]]:
    """By title, a row whose sides differ too early, of each evaluation set the worst pair above the row it shares most
    with, and of each fault the first example."""
    early = result["turns"]["example"]
    matches = ((found["set"], found["examples"]) for found in result.get("contamination", {}).get("sets", ()))
    return {
        "sides that differ before the last assistant turn": [
            f"  row {one['row']:,} of {one['source']}, messages in common: {one['shared']}\n"
            f"    chosen: {one['chosen'][:300]!r}\n    rejected: {one['rejected'][:300]!r}"
            for one in filter(None, [early])
        ],
        "in common with evaluation sets": [
            f"  {name}\n    pair {one['row']:,}, {one['side']}: {one['text'][:300]!r}\n"
            f"    row {one['set_row']:,} of the set: {one['set_text'][:300]!r}"
            for name, examples in matches
            for one in examples[:1]
        ],
        "examples of what looks wrong": [
            f"  {fault['text']}\n    row {one['row']:,}, {one['side']}: {one['text'][:200]!r}"
            for fault in result["faults"]
            for one in fault["examples"][:1]
        ],
    }


def list_drops(result: dict[str, Any]) -> list[str]:
    """Rows that cannot be used, one line a reason."""
    return [f"{n:,} of {result['rows']:,} rows dropped: {DROP_REASONS[key]}" for key, n in result["dropped"].items()]


def _draw_lengths(axes: Axes, result: dict[str, Any]) -> None:
    curves = result["curves"]
    centres = np.sqrt(np.multiply(curves["edges"][:-1], curves["edges"][1:]))
    for color, (name, counts) in zip((COLORS[2], COLORS[0], COLORS[1]), curves["pairs"].items(), strict=True):
        density = np.array(counts) / np.diff(np.log2(curves["edges"])) / result["pairs"]
        axes.plot(centres, density, color=color, label=name)
        axes.fill_between(centres, density, color=color, alpha=0.15, linewidth=0)
    axes.set(title="Lengths", xlabel="tokens", ylabel="share of pairs per doubling of length", ylim=(0, None))
    axes.legend()
    _log2_axis(axes, curves["edges"][0], curves["edges"][-1])


def _draw_coverage(axes: Axes, result: dict[str, Any]) -> None:
    best, curves = result["recommendation"], result["curves"]
    shares = {row["max_length"]: row["untouched"] for row in result["candidates"]}
    axes.plot(curves["length"], curves["coverage"], color=COLORS[0])
    axes.plot(list(shares), list(shares.values()), "o", color=COLORS[0], markersize=3.5)
    axes.axhline(best["min_coverage"], color=INK, linewidth=0.7, linestyle=":")
    axes.axvline(best["max_length"], color=COLORS[1], linewidth=1.1, linestyle="--")
    label = f"max_length {best['max_length']:,}: recommended"
    axes.text(best["max_length"] * 0.94, 0.03, label, rotation=90, ha="right", fontsize=8, color=COLORS[1])
    for length, share in shares.items():
        if length == best["max_length"] or (length & (length - 1) == 0 and share < 0.995):  # an octave apart: legible
            axes.annotate(f"{share:.1%}", (length, share), (5, -10), textcoords="offset points", fontsize=7.5)
    axes.set(
        title="Pairs that stay whole",
        xlabel="max_length: prompt + longer response, tokens",
        ylabel="share of pairs",
        ylim=(0, 1.04),
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _log2_axis(axes, min(curves["length"][0], *shares), 1.5 * max(*shares, curves["length"][-1]))


def _log2_axis(axes: Axes, low: float, high: float) -> None:
    axes.set_xscale("log", base=2)
    powers = range(math.ceil(math.log2(low)), int(math.log2(high)) + 1)
    axes.set(xlim=(low, high), xticks=[2.0**power for power in powers[:: 1 + len(powers) // 8]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))


def draw_panels(result: dict[str, Any]) -> Figure:
    """Distribution of lengths, and the share of pairs that stay whole by max_length."""
    figure = Figure(figsize=(9.2, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_lengths(left, result)
    _draw_coverage(right, result)
    return figure


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Both panels side by side on white, legible in a README; the format follows the name's ending."""
    with rc_context(STYLE):
        draw_panels(result).savefig(path, facecolor="white")


def write_page(result: dict[str, Any], path: Path) -> None:
    """One self-contained page: nothing loaded, no script; light, dark, narrow, wide."""
    with rc_context(STYLE):
        picture = to_svg(draw_panels(result), "lengths")
    page = render_page(
        "lengths.html.jinja",
        **result,
        heading=format_heading(result),
        drops=list_drops(result),
        picture=picture,
        tables=[(title.capitalize(), rows, NOTES.get(title, "")) for title, rows in build_tables(result).items()],
        yaml_lines=format_recipe_lines(result),
    )
    write_atomically(path, page)
