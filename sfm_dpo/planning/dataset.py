"""Analysis of a dataset before training: lengths, the recommended max_length, and problems of the pairs.

It reads and tokenises as training does, into the same cache; `analyze_dataset.py --help` describes the JSON.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from sfm_dpo.config import Config
from sfm_dpo.data.answers import compare_sides
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.data.pairs import DROP_REASONS, describe_ignored
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.tokenization import load_tokenizer, tokenize_splits
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import load_model_config, meta_model
from sfm_dpo.planning.length_advice import analyze_lengths

# If one side is longer in at least this share of the pairs, length alone predicts the preference.
LENGTH_BIAS = 0.6


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
    pairs = tokenize_splits(loaded, tokenizer, **options)
    if dropped_file:
        pairs.write_dropped(dropped_file)
    pairs.check_dropped(limit=1.0)
    texts = concatenate_datasets(list(loaded.splits.values()))
    tokens = concatenate_datasets(list(pairs.splits.values()))
    result = {
        "dataset": pairs.sources,
        "model": config.model.model_name_or_path,
        "rows": pairs.rows,
        "usable": pairs.rows - len(loaded.dropped_rows),
        "dropped": dict(pairs.dropped),
        "pairs": len(tokens),
        "control_tokens": int(np.sum(tokens["control_tokens"][:])),
    }
    lengths = Lengths.of(tokens)
    sources = np.array(tokens["source"][:], dtype=object)
    count = functools.lru_cache(maxsize=2)(functools.partial(count_trained, tokens))
    result["sides"] = compare_sides(sources, {"tokens": count(None, None)})
    model_config = load_model_config(config)
    result |= analyze_lengths(
        lengths,
        count,
        ForwardFlops.of(meta_model(model_config)),
        min_coverage=min_coverage,
        min_tokens_kept=min_tokens_kept,
        limit=getattr(model_config.get_text_config(), "max_position_embeddings", None),
        overlong=args.overlong,
    )
    best = result["recommendation"]
    if best["overlong"]:
        best["reason"] += (
            f"\nWith overlong: truncate, {best['cut']['chosen']:,} chosen and {best['cut']['rejected']:,} rejected "
            f"answers lose their end. With overlong: drop, {best['overlong']:,} pairs are left out."
        )
    result["findings"] = _list_findings(result, texts, tokens)
    return result


def _list_findings(result: dict[str, Any], texts: Dataset, tokens: Dataset) -> list[dict[str, str]]:
    """Findings to read before training, each {"level": "warning" or "note", "text"}; `result`: the analysis so far."""
    findings = []

    def add(level: str, count: int, text: str) -> None:
        if count:
            findings.append({"level": level, "text": f"{count:,} {text}"})

    chosen_longer = result["length_bias"]["chosen_longer"]
    share = max(chosen_longer, 1 - chosen_longer)
    side, preferred = ("chosen", "longer") if chosen_longer >= 0.5 else ("rejected", "shorter")
    if share >= LENGTH_BIAS:
        text = f"the {side} response is the longer one in {share:.1%} of the pairs: DPO will learn to prefer "
        findings.append({"level": "warning", "text": f"{text}{preferred} answers; balance them by filter_script"})
    no_signal = result["recommendation"]["no_signal"]
    add("warning", no_signal, "pairs are identical on both sides after truncation and teach nothing: raise max_length")
    repeated_pairs = len(texts) - len(set(texts["pair_key"]))
    add("warning", repeated_pairs, "pairs are exact repeats of earlier ones: set drop_duplicates to pairs")
    text = "pairs contain special tokens, which act like the template's own: filter_script removes them"
    add("warning", result["control_tokens"], text)
    text = (
        "prompts are not a token prefix of prompt+response; their tokens after the shared ones are left out: compare "
        "the template's generation prompt with its assistant turns"
    )
    add("warning", int(np.count_nonzero(tokens["prompt_trimmed"])), text)
    repeated_prompts = len(texts) - len(set(texts["prompt_key"])) - repeated_pairs
    text = "pairs have the prompt of an earlier pair but other responses: drop_duplicates: prompts removes them"
    add("note", repeated_prompts, text)
    findings += [{"level": "warning", "text": text} for text in describe_ignored(tokens)]
    for reason, count in result["dropped"].items():
        text = f"of {result['rows']:,} rows dropped: {DROP_REASONS[reason]}: --dropped FILE lists them"
        add("note", count, text)
    return findings
