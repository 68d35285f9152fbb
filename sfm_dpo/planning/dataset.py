"""Which max_length, and what is wrong with the pairs? The whole analysis of a data set, on the path of training.

`analyze_dataset` reads, tokenises (into the cache that training reads) and measures; its dict is the JSON that
docs/lengths.md describes, and length_report.py shows it.
"""

from collections import Counter
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedTokenizerBase

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.token_lengths import Lengths, measure, turns
from sfm_dpo.data.tokenization import load_tokenizer, tokenize_pairs
from sfm_dpo.planning.lengths import analyze, repeats

# Chosen longer in this share of the pairs or more, or rejected: length alone then predicts the preference.
LENGTH_BIAS = 0.6
# More prompts than this share over half of max_length are worth a warning.
LONG_PROMPTS = 0.01


def analyze_dataset(config: Config, min_coverage: float, min_tokens_kept: float) -> dict[str, Any]:
    """Everything about the pairs of a configuration; of its fields those of data and tokenizer count.

    Raises:
        UserError: as load_pairs and load_tokenizer; or no pair is left after tokenization.
    """
    args = config.train
    args.max_dropped_fraction = 1.0  # here to be seen, in training to be stopped by
    tokenizer = load_tokenizer(config)
    pairs = load_pairs(config)
    splits = [split for split in (pairs.train, pairs.eval) if split is not None]
    counts: Counter = Counter()
    parts = []
    for split in splits:  # one by one, as training tokenises them: the cache knows each by its fingerprint
        tokens, happened = tokenize_pairs(split, tokenizer, None, None, args.dataset_num_proc)
        parts.append(tokens)
        counts += happened
    tokens = concatenate_datasets(parts)
    dropped = pairs.dropped + Counter({k: n for k, n in counts.items() if not k.startswith("prompt_")})
    if not len(tokens):
        raise UserError(
            f"dataset_name {', '.join(pairs.sources)}: no pair is left after tokenization ({dict(dropped)})"
        )
    lengths, prompt_keys, pair_keys = measure(tokens, args.dataset_num_proc)
    several_turns = float((turns(concatenate_datasets(splits), args.dataset_num_proc) > 1).mean())
    limit, forward_flops = model_facts(config, tokenizer)
    sampled = pairs.rows - pairs.dropped.total() > sum(map(len, splits)) and args.max_samples is not None
    result = {
        "dataset": pairs.sources,
        "model": config.model.model_name_or_path,
        "rows": pairs.rows,
        "usable": pairs.rows - pairs.dropped.total(),
        "dropped": dict(dropped),
        "pairs": len(tokens),
        "sampled": sampled,
        "seed": args.seed,
    }
    result |= analyze(
        lengths,
        min_coverage=min_coverage,
        min_tokens_kept=min_tokens_kept,
        limit=limit,
        max_prompt_length=args.max_prompt_length,
        global_batch=args.global_batch_size,
        sampled=sampled,
        forward_flops=forward_flops,
    )
    result["findings"] = findings(result, lengths, counts, several_turns, (repeats(prompt_keys), repeats(pair_keys)))
    result["example"] = example(tokens, lengths, tokenizer)
    return result


def model_facts(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, Any]:
    """The model's longest context and FLOPs of a forward, from its config.json; of a folder that holds a tokenizer
    alone, what the tokenizer says, and None."""
    try:
        model = AutoConfig.from_pretrained(
            config.model.model_name_or_path,
            revision=config.model.model_revision,
            trust_remote_code=config.train.trust_remote_code,
        )
    except (OSError, ValueError, StrictDataclassError):
        stated = tokenizer.model_max_length
        return (stated if stated < 10**9 else None), None  # transformers' stand-in for "not stated" is 1e30
    import torch

    from sfm_dpo.model.flops import ForwardFlops

    forward = ForwardFlops.of_config(model)
    limit = getattr(model.get_text_config(), "max_position_embeddings", None)
    return limit, lambda lengths, response_tokens: forward(torch.from_numpy(lengths), response_tokens)


def findings(
    result: dict[str, Any], lengths: Lengths, counts: Counter, several_turns: float, duplicates: tuple[int, int]
) -> list[dict[str, str]]:
    """What a person should know before training, each {"level": "warning" or "note", "text"}.

    Args:
        result: of `analyze`.
        counts: of tokenize_pairs.
        several_turns: share of the prompts with more than one user message.
        duplicates: prompts and pairs that occurred before.
    """
    n, best, bias = len(lengths), result["recommendation"], result["length_bias"]
    limit = best["max_prompt_length"]
    said: list[tuple[bool, str]] = []
    share = bias["chosen_longer"]
    longer, by = ("chosen", share) if share >= 0.5 else ("rejected", 1 - share)
    text = (
        f"the {longer} response is the longer one in {by:.1%} of the pairs (median chosen/rejected "
        f"{bias['median_ratio']:.2f}, means {bias['mean_chosen']:,.0f} and {bias['mean_rejected']:,.0f} tokens)"
    )
    biased = by - bias["margin"] >= LENGTH_BIAS
    said.append(
        (
            biased,
            text + (f": DPO will learn that {'longer' if share > 0.5 else 'shorter'} is better" if biased else ""),
        )
    )
    if fill := int((lengths.prompt > best["max_length"] // 2).sum()):
        said.append(
            (fill > LONG_PROMPTS * n, f"{fill:,} prompts fill more than half of max_length {best['max_length']:,}")
        )
    if best["prompts_cut"]:
        said.append((False, f"max_prompt_length {limit:,} cuts the start of {best['prompts_cut']:,} prompts"))
    if best["no_signal"]:
        said.append(
            (True, f"{best['no_signal']:,} pairs are cut to the same tokens on both sides: they teach nothing")
        )
    prompts, pairs = duplicates
    if pairs:
        said.append((True, f"{pairs:,} pairs are exact repeats of earlier ones"))
    if prompts > pairs:
        said.append((False, f"{prompts:,} pairs have the prompt of an earlier one"))
    if counts["prompt_trimmed"]:
        said.append(
            (
                True,
                f"{counts['prompt_trimmed']:,} prompts are no token prefix of prompt+response (chat template): their "
                "last tokens count as response and are trained",
            )
        )
    said.append((False, f"{several_turns:.1%} of the prompts are conversations with several user turns"))
    return [{"level": "warning" if warn else "note", "text": text} for warn, text in said]


def example(tokens: Dataset, lengths: Lengths, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The pair of median length, decoded, with the tokens on either side of where the response begins."""
    row = int(np.argsort(lengths.total, kind="stable")[(len(lengths) - 1) // 2])
    pair = tokens[row]
    out: dict[str, Any] = {"row": row}
    for name in ("prompt", "chosen", "rejected"):
        ids = pair[f"{name}_ids"]
        out[name] = {"tokens": len(ids), "text": _excerpt(ids, tokenizer)}
        out[name] |= {
            "first": [tokenizer.decode([i]) for i in ids[:6]],
            "last": [tokenizer.decode([i]) for i in ids[-6:]],
        }
    return out


def _excerpt(ids: list[int], tokenizer: PreTrainedTokenizerBase, head: int = 120, tail: int = 40) -> str:
    if len(ids) <= head + tail:
        return tokenizer.decode(ids)
    left_out = f" [... {len(ids) - head - tail:,} tokens ...] "
    return tokenizer.decode(ids[:head]) + left_out + tokenizer.decode(ids[-tail:])
