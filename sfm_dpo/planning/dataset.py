"""Analysis of a dataset before training: lengths, the recommended max_length, and problems of the pairs.

It reads and tokenises as training does, into the same cache; `analyze_dataset.py --help` describes the JSON.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from matplotlib import rc_context
from matplotlib.figure import Figure

from sfm_dpo.common.files import format_table
from sfm_dpo.config.fields import Config
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.data.pairs import HISTORY, Pairs, describe_ignored, drop_rows
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.tokenization import choose_date, load_tokenizer, tokenize_splits
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import count_positions, load_model_config, meta_model
from sfm_dpo.planning.length_advice import PERCENTILES, analyze_lengths
from sfm_dpo.report.plots import COLORS, INK, STYLE


def analyze_dataset(
    config: Config, min_coverage: float, min_tokens_kept: float, dropped_file: Path | None = None
) -> dict[str, Any]:
    """The full analysis of a configuration's pairs; `dropped_file` receives a JSON line for each unusable row."""
    args = config.train
    tokenizer = load_tokenizer(config)
    loaded = load_pairs(config)
    if dropped_file:
        loaded.write_dropped(dropped_file)
    loaded.check_dropped(limit=1.0)  # unusable rows stop training, but are reported here
    # Split by split, as in training, because the cache is keyed by the fingerprint of each
    options: dict[str, Any] = {"num_proc": args.dataset_num_proc, "mask_tool_results": args.mask_tool_results}
    options["template_date"] = choose_date(tokenizer, args.template_date)
    pairs = tokenize_splits(loaded, tokenizer, **options)
    texts = concatenate_datasets(list(loaded.splits.values()))
    tokens = concatenate_datasets(list(pairs.splits.values()))
    lengths = Lengths.of(tokens)
    count = functools.lru_cache(maxsize=2)(functools.partial(count_trained, tokens))
    if dropped_file:  # with the pairs that a run drops for their lengths
        limits = (args.max_length, args.max_prompt_length)
        _, late = drop_rows(tokens, lengths.find_unused(count(*limits), *limits, args.overlong))
        replace(pairs, dropped_rows=pairs.dropped_rows + late).write_dropped(dropped_file)
    pairs.check_dropped(limit=1.0)
    result = {
        "dataset": pairs.sources,
        "model": config.model.model_name_or_path,
        "rows": pairs.rows,
        "usable": pairs.rows - len(loaded.dropped_rows),
        "dropped": dict(pairs.dropped),
        "pairs": len(tokens),
        "control_tokens": int(np.sum(tokens["control_tokens"][:])),
    }
    model_config = load_model_config(config)
    result |= analyze_lengths(
        lengths,
        count,
        ForwardFlops.of(meta_model(model_config)),
        min_coverage=min_coverage,
        min_tokens_kept=min_tokens_kept,
        limit=count_positions(config, model_config),
        overlong=args.overlong,
    )
    result["findings"] = _list_findings(result, texts, tokens, pairs)
    return result


def _list_findings(result: dict[str, Any], texts: Dataset, tokens: Dataset, pairs: Pairs) -> list[dict[str, str]]:
    """Findings to read before training, each {"level": "warning" or "note", "text"}; `result`: the analysis so far."""
    findings = []

    def add(level: str, count: int, text: str) -> None:
        if count:
            findings.append({"level": level, "text": f"{count:,} {text}"})

    chosen_longer = result["length_bias"]["chosen_longer"]
    share = max(chosen_longer, 1 - chosen_longer)
    side, preferred = ("chosen", "longer") if chosen_longer >= 0.5 else ("rejected", "shorter")
    if share >= 0.6:  # length alone predicts the preference
        text = f"the {side} response is the longer one in {share:.1%} of the pairs: DPO will learn to prefer "
        findings.append({"level": "warning", "text": f"{text}{preferred} answers; balance them by filter_script"})
    repeated_pairs = len(texts) - len(set(texts["pair_key"]))
    add("warning", repeated_pairs, "pairs are exact repeats of earlier ones: set drop_duplicates to pairs")
    text = "pairs contain special tokens, which act like the template's own: unless rendered, remove by filter_script"
    add("warning", result["control_tokens"], text)
    text = (
        "prompts are not a token prefix of prompt+response; their tokens after the shared ones are left out: compare "
        "the template's generation prompt with its assistant turns"
    )
    add("warning", int(np.count_nonzero(tokens["prompt_trimmed"])), text)
    repeated_prompts = len(texts) - len(set(texts["prompt_key"])) - repeated_pairs
    text = "pairs have the prompt of an earlier pair but other responses: drop_duplicates: prompts removes them"
    add("note", repeated_prompts, text)
    for kind, text in describe_ignored(tokens).items():
        findings.append({"level": "note" if kind.endswith(HISTORY) else "warning", "text": text})
    for reason, count in pairs.dropped.items():
        add("note", count, f"of {pairs.rows:,} rows dropped: {pairs.explain(reason)}; --dropped FILE lists them")
    return findings


NOTE = (
    "*: recommended. untruncated: pairs that lose no token. dropped: no response token is left, both responses are\n"
    "equal once cut (equal) or, with overlong: drop, the pair is longer. tokens, FLOPs: per epoch, without padding.\n"
    "step time: relative to the recommendation."
)
HEADINGS = "max_length,max_prompt_length,untruncated,tokens kept,dropped,equal,tokens,FLOPs,step time".split(",")
LINES: dict[str, tuple[str, dict[str, Any]]] = {  # curve: (label, style)
    "total": ("prompt + longer", {"color": COLORS[0], "linewidth": 1.8}),
    "prompt": ("prompt", {"color": INK, "linestyle": ":"}),
    "chosen": ("chosen", {"color": COLORS[2]}),
    "rejected": ("rejected", {"color": COLORS[1]}),
}


def format_analysis(result: dict[str, Any]) -> str:
    """The analysis as text for a terminal; it ends with lines for a recipe."""
    sides = result["percentiles"]
    percentiles = []
    for q in PERCENTILES:
        tokens = [f"{values[str(q)]:,}" for values in sides.values()]
        percentiles.append(["longest" if q == 100 else f"{q}%", *tokens])
    percentiles.append(["mean", *(f"{values['mean']:,.0f}" for values in sides.values())])
    best = result["recommendation"]
    candidates = []
    for row in result["candidates"]:
        mark = "* " if row["max_length"] == best["max_length"] else ""
        prompt_length = row["max_prompt_length"]
        cells = [f"{mark}{row['max_length']:,}", f"{prompt_length:,}" if prompt_length else "not needed"]
        cells += [f"{row['untruncated']:.1%}", f"{row['tokens_kept']:.1%}"]
        cells += [f"{row['dropped']:,}", f"{row['equal']:,}", f"{row['tokens'] / 1e6:,.2f} M"]
        candidates.append([*cells, f"{row['flops']:.2e}", f"x {row['relative_time']:.2f}"])
    pairs = f"{result['pairs']:,} of {result['usable']:,} usable pairs"
    findings = [f"  {finding['level']}: {finding['text']}" for finding in result["findings"]]
    parts = [
        f"{' + '.join(result['dataset'])}: {pairs}, tokens of {result['model']}",
        f"Tokens\n{format_table(percentiles, ['percentile', *(LINES[side][0] for side in sides)], 'r')}",
        f"What each max_length keeps and costs\n{format_table(candidates, HEADINGS, 'r')}",
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
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:.0%}")
        figure.legend(loc="outside lower left", ncols=3)  # inside, every corner may hold a curve
        figure.savefig(path, facecolor="white")
