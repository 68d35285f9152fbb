"""Analysis of a dataset before training: lengths, the recommended max_length, and what looks wrong with the pairs.

`analyze_dataset` reads and tokenises on the path of training (into the cache that training reads) and measures; its
dict is the JSON that docs/lengths.md describes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.data.contamination import NGRAM, report_contamination
from sfm_dpo.data.faults import find_faults, summarize_faults
from sfm_dpo.data.filters import filter_lengths, judge_lengths, judge_texts, measure_texts
from sfm_dpo.data.preferences import Pairs, load_pairs
from sfm_dpo.data.token_lengths import Lengths, describe_turns, measure_lengths
from sfm_dpo.data.tokenization import load_tokenizer, tokenize_pairs
from sfm_dpo.health.preflight import PREFLIGHT
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.model.memory import meta_model
from sfm_dpo.planning.lengths import analyze_lengths
from sfm_dpo.planning.run_plan import Cluster, Planner
from sfm_dpo.run.folder import read_mapping

# Chosen longer in this share of the pairs or more, or rejected: length alone then predicts the preference.
LENGTH_BIAS = 0.6
# More prompts than this share over half of max_length are worth a warning.
LONG_PROMPTS = 0.01
# A base model's preference differs less than that between sources whose sides are right (it follows length and style).
SWAPPED = 0.2
# Whose effect is shown where a field is off. 0.8: one word in 45 differs. Answers of 4 to 1 in length, of fewer than 4
# tokens (a word and the end of turn), or with 95% of their word pairs in common are worth a look.
SUGGESTED_FILTERS: tuple[dict[str, Any], ...] = (
    {"drop_duplicates": "pairs"},
    {"drop_duplicates": "prompts"},
    {"drop_duplicates": "pairs", "duplicate_threshold": 0.8},
    {"drop_duplicates": "prompts", "duplicate_threshold": 0.8},
    {"max_pairs_per_prompt": 4},
    {"max_response_similarity": 0.95},
    {"max_length_ratio": 4},
    {"min_response_tokens": 4},
)


def analyze_dataset(
    config: Config,
    min_coverage: float,
    min_tokens_kept: float,
    against: Sequence[str] = (),
    ngram: int = NGRAM,
    cluster: Cluster | None = None,
    dropped_file: Path | None = None,
) -> dict[str, Any]:
    """Everything about the pairs of a configuration; of its fields those of data and tokenizer count.

    Args:
        against: evaluation sets (see read_evaluation_texts) with which pairs may share n-grams of `ngram` words.
        cluster: of which hours and memory are planned for each candidate.
        dropped_file: receives a JSON line for each row that cannot be used.

    Raises:
        UserError: as load_pairs, load_tokenizer and report_contamination; or no pair is left after tokenization.
    """
    args = config.train
    args.max_dropped_fraction = 1.0  # unusable rows are reported here; training stops at them
    tokenizer = load_tokenizer(config)
    pairs = load_pairs(config)
    splits = [split for split in (pairs.train, pairs.eval) if split is not None]
    counts: Counter = Counter()
    parts = []
    for split in splits:  # one by one, as training tokenises them: the cache knows each by its fingerprint
        part, part_counts = tokenize_pairs(split, tokenizer, None, None, args.dataset_num_proc, pairs.dropped_rows)
        part, filtered = filter_lengths(part, args, pairs.dropped_rows)
        parts.append(part)
        counts += part_counts + filtered
    if dropped_file:
        pairs.write_dropped(dropped_file)
    tokens = concatenate_datasets(parts)
    dropped = pairs.dropped + Counter({k: n for k, n in counts.items() if not k.startswith("prompt_")})
    if not len(tokens):
        raise UserError(
            f"dataset_name {', '.join(pairs.sources)}: no pair is left after tokenization ({dict(dropped)})"
        )
    lengths, prompt_keys, pair_keys = measure_lengths(tokens, args.dataset_num_proc)
    limit, forward_flops = read_model_limits(config, tokenizer)
    usable = pairs.rows - pairs.dropped.total()
    result = {
        "dataset": pairs.sources,
        "model": config.model.model_name_or_path,
        "rows": pairs.rows,
        "usable": usable,
        "dropped": dict(dropped),
        "pairs": len(tokens),
        "sampled": args.max_samples is not None and usable > sum(map(len, splits)),
        "seed": args.seed,
    }
    result |= analyze_lengths(
        lengths,
        min_coverage=min_coverage,
        min_tokens_kept=min_tokens_kept,
        limit=limit,
        max_prompt_length=args.max_prompt_length,
        global_batch=args.global_batch_size,
        sampled=result["sampled"],
        forward_flops=forward_flops,
    )
    texts = concatenate_datasets(splits)
    if cluster:
        add_costs(result, config, lengths, usable if result["sampled"] else len(tokens), cluster)
    turns = describe_turns(texts, args.dataset_num_proc)
    result["turns"] = summarize_turns(pairs, turns, np.array(texts["source"][:]))
    repeats = [len(keys) - len(np.unique(keys)) for keys in (prompt_keys, pair_keys)]
    several_turns = float(turns["multi_turn"].mean())
    result["findings"] = list_findings(result, lengths, repeats, counts["prompt_trimmed"], several_turns)
    result["example"] = decode_example(tokens, lengths, tokenizer)
    measures = measure_texts(texts, args.dataset_num_proc)[:]
    longest = result["recommendation"]["max_length"]
    result["filters"] = preview_filters(
        measures, lengths, args, (*SUGGESTED_FILTERS, {"max_response_tokens": longest})
    )
    result["faults"] = summarize_faults(texts, find_faults(texts, args.dataset_num_proc))
    if against:
        keys = measures["pair_key"]
        result["contamination"] = report_contamination(texts, keys, list(against), ngram, args.dataset_num_proc)
    base = read_mapping(Path(args.output_dir) / PREFLIGHT).get("figures", {})
    for source in find_swapped_sources(base.get("by_source", [])):
        text = (
            "the base model prefers the chosen answers of {source} in {preferred:.0%} of {pairs:,} pairs, those of "
            "the other sources in {others:.0%}: chosen and rejected may be swapped there"
        )
        result["findings"].append({"level": "warning", "text": text.format(**source)})
    return result


def summarize_turns(pairs: Pairs, turns: dict[str, np.ndarray], sources: np.ndarray) -> dict[str, Any]:
    """Of each source the pairs that describe_turns marks and the rows dropped as prompts_differ, with an example."""
    dropped: Counter = Counter()
    for part in pairs.dropped_rows:
        dropped.update(zip(part["source"][:], part["dropped"][:], strict=True))
    rows = []
    for source in dict.fromkeys(pairs.sources):
        of = sources == source
        counts = {name: int(marks[of].sum()) for name, marks in turns.items()}
        differ = dropped[source, "prompts_differ"]
        rows.append({"source": source, "pairs": int(of.sum()), **counts, "prompts_differ": differ})
    return {"sources": rows, "example": pairs.early_difference}


def add_costs(result: dict[str, Any], config: Config, lengths: Lengths, pairs: int, cluster: Cluster) -> None:
    """Adds to each candidate the `hours` of the run [least, most] and the bytes on each GPU (`gpu_memory`) under
    ZeRO-2, as scripts/plan.py plans the configuration.

    Raises:
        UserError: the model has no config.json, or the GPUs do not divide the global batch.
    """
    args, best = config.train, result["recommendation"]
    args.max_length, args.max_prompt_length = best["max_length"], best["max_prompt_length"]
    planner = Planner(config, load_model_config(config, needs_weights=False), lengths, pairs, cluster)
    result["cluster"] = {"gpu": cluster.gpu, "gpus": cluster.gpus, "per_device": config.micro_batch}
    for row in result["candidates"]:
        plan = planner.truncated(row["max_length"], row["max_prompt_length"])
        hours = [entry["training"] + entry["reference"] for entry in plan.plan_time()["hours"]]
        row["hours"] = [min(hours), max(hours)]
        row["gpu_memory"] = plan.choose("zero2").bytes


def find_swapped_sources(by_source: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sources in which the base model prefers the other side than in the rest, with the share of the rest as `others`.

    That is: on the other side of one half, by SWAPPED or more, and by 4 standard errors (by chance one source in
    15,000).

    Args:
        by_source: of preflight.json: `source`, `pairs`, and the share `preferred`.
    """
    swapped = []
    for row in by_source:
        rest = [other for other in by_source if other is not row]
        if n := sum(other["pairs"] for other in rest):
            others = sum(other["pairs"] * other["preferred"] for other in rest) / n
            error = math.sqrt(0.25 / row["pairs"] + 0.25 / n)
            far = abs(row["preferred"] - others) >= max(SWAPPED, 4 * error)
            if far and (row["preferred"] < 0.5) != (others < 0.5):
                swapped.append(row | {"others": others})
    return swapped


def preview_filters(
    measures: dict[str, np.ndarray], lengths: Lengths, args: TrainConfig, settings: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """How many pairs each of `settings` (fields and values) alone would leave out; without those that are on."""
    rows = []
    for setting in settings:
        if all(getattr(args, name) in (None, "no", 1.0) for name in setting):
            of_texts = not setting.keys() & {"max_length_ratio", "min_response_tokens", "max_response_tokens"}
            reasons = (
                judge_texts(measures, **setting)
                if of_texts
                else judge_lengths(lengths.chosen, lengths.rejected, **setting)
            )
            text = ", ".join(f"{name}: {value}" for name, value in setting.items())
            rows.append({"setting": text, "pairs": int((reasons != "").sum())})
    return rows


def read_model_limits(
    config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[int | None, Callable[[np.ndarray, int], int] | None]:
    """The model's longest context and FLOPs of a forward, from its config.json; of a folder that holds a tokenizer
    alone, the tokenizer's limit, and None."""
    try:
        shape = load_model_config(config, needs_weights=False)
    except UserError:
        limit = tokenizer.model_max_length
        return (limit if limit < 10**9 else None), None  # transformers' stand-in for "not stated" is 1e30
    forward = ForwardFlops.of(meta_model(shape))
    limit = getattr(shape.get_text_config(), "max_position_embeddings", None)
    return limit, lambda lengths, response_tokens: forward(torch.from_numpy(lengths), response_tokens)


def list_findings(
    result: dict[str, Any], lengths: Lengths, repeats: list[int], trimmed: int, several_turns: float
) -> list[dict[str, str]]:
    """What to know before training, each {"level": "warning" or "note", "text"}.

    Args:
        result: of `analyze_lengths`.
        repeats: pairs whose prompt occurred before, and pairs all of which did.
        trimmed: pairs whose prompt is no token prefix of prompt+response.
        several_turns: share of the prompts with more than one user message.
    """
    best, bias, (repeated_prompts, repeated_pairs) = result["recommendation"], result["length_bias"], repeats
    side, learned = ("chosen", "longer") if bias["chosen_longer"] >= 0.5 else ("rejected", "shorter")
    share = max(bias["chosen_longer"], 1 - bias["chosen_longer"])
    biased = share - bias["margin"] >= LENGTH_BIAS
    long = int((lengths.prompt > best["max_length"] // 2).sum())
    repeated_prompts -= repeated_pairs
    differ = result["dropped"].get("prompts_differ", 0)
    findings = [  # (is a warning, how many pairs, text); None: always stated
        (
            biased,
            None,
            f"the {side} response is the longer one in {share:.1%} of the pairs (means {bias['mean_chosen']:,.0f} and "
            f"{bias['mean_rejected']:,.0f} tokens){f': DPO will learn that {learned} is better' if biased else ''}",
        ),
        (
            long > LONG_PROMPTS * len(lengths),
            long,
            f"prompts fill more than half of max_length {best['max_length']:,}",
        ),
        (False, best["prompts_cut"], f"prompts lose their start to max_prompt_length {best['max_prompt_length']}"),
        (True, best["no_signal"], "pairs are cut to the same tokens on both sides: they teach nothing"),
        (True, repeated_pairs, "pairs are exact repeats of earlier ones"),
        (False, repeated_prompts, "pairs have the prompt of an earlier one and other responses"),
        (True, trimmed, "prompts are no token prefix of prompt+response: what follows the shared tokens is left out"),
        (True, differ, f"rows ({differ / result['rows']:.2%}) differ before the last assistant turn, and are dropped"),
        (False, None, f"{several_turns:.1%} of the prompts are conversations with several user turns"),
    ]
    return [
        {"level": "warning" if warning else "note", "text": text if count is None else f"{count:,} {text}"}
        for warning, count, text in findings
        if count != 0
    ]


def decode_example(tokens: Dataset, lengths: Lengths, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The pair of median length, decoded; of a long text the first and last tokens."""
    row = int(np.argsort(lengths.total, kind="stable")[(len(lengths) - 1) // 2])
    example: dict[str, Any] = {"row": row}
    for name in ("prompt", "chosen", "rejected"):
        ids = tokens[row][f"{name}_ids"]
        text = tokenizer.decode(ids)
        if len(ids) > 160:
            text = f"{tokenizer.decode(ids[:120])} [... {len(ids) - 160:,} tokens ...] {tokenizer.decode(ids[-40:])}"
        example[name] = {"tokens": len(ids), "text": text}
    return example
