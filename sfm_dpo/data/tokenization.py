"""Tokenization: preference pairs to prompt_ids, chosen_ids and rejected_ids, batched, parallel and cached on disk.

The ids are those of TRL's own preparation (`DPOTrainer._prepare_dataset`), which tokenises one row at a time and
whose cache key covers every training argument.
"""

import copy
import dataclasses
import functools
import json
from collections import Counter
from typing import Any

import datasets
import numpy as np
import transformers
from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import DatasetMixtureConfig
from trl.data_utils import common_prefix_length
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.config_checks import read_eval_sets
from sfm_dpo.data.filters import filter_lengths
from sfm_dpo.data.preferences import DROP_REASONS, Pairs, load_pairs
from sfm_dpo.data.sources import list_dropped, room_in_cache
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.model.loading import TOKENIZER_FILES, check_files

# Part of the cache's key. Raise it with any change of this module that changes an id, a length or a drop reason.
TOKENS_VERSION = 2
# Rows a call of the tokenizer: it holds some 300 bytes a token beside the ids, and a long pair has 50,000 tokens.
BATCH_ROWS = 100
_PARTS = ("prompt", "chosen", "rejected")
# Fields that choose among the pairs to train on; a set of eval_datasets is taken as it is
_OF_TRAINING = """eval_datasets eval_fraction max_samples keep_values filter_script drop_duplicates
    max_pairs_per_prompt max_response_similarity min_response_tokens max_response_tokens max_length_ratio
    drop_contaminated""".split()
_TOKENS = Features(
    {f"{part}_ids": List(Value("int32")) for part in _PARTS}
    | {f"{part}_length": Value("int32") for part in _PARTS}
    # Tokens taken from the prompt's end because prompt+response diverges from it
    | {"prompt_trimmed": Value("int32"), "source": Value("string"), "dropped": Value("string")}
    | {"row": Value("int64")}
)


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's own folder or repository, with a pad token.

    Raises:
        UserError: no such model, or a folder without a tokenizer.
    """
    name, args = config.model.model_name_or_path, config.train
    check_files(name, TOKENIZER_FILES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=config.model.model_revision, trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model_name_or_path {name}: no tokenizer can be loaded: {reason}") from error
    if tokenizer.eos_token is None:
        raise UserError(f"model_name_or_path {name}: its tokenizer has no EOS token; set eos_token in its config")
    if args.pad_token is not None and args.pad_token not in tokenizer.get_vocab():
        raise UserError(
            f"pad_token {args.pad_token}: is not in the tokenizer of {name}; remove it, or name one that is"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@room_in_cache()
def tokenize_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    max_prompt_length: int | None = None,
    num_proc: int | None = None,
    dropped_rows: list[Dataset] | None = None,
) -> tuple[Dataset, Counter]:
    """Token ids and lengths of `pairs` (see preferences.py), and counts of what happened to them.

    A second call with the same pairs and tokenizer reads the cache, whatever the two lengths: `max_prompt_length`
    copies it with the starts of longer prompts left out, and `max_length` truncates in TRL's collator and here only
    drops the pairs whose prompt fills it. What is dropped is appended to `dropped_rows`, as in preferences.Pairs.

    Returns:
        The dataset (columns of _TOKENS but `dropped`; ids are lists of int) and a Counter over the keys
        "malformed", "chosen_equals_rejected", "empty_response", "prompt_too_long" (dropped), "prompt_cut" and
        "prompt_trimmed" (kept).
    """
    # Not the key that datasets would make: it hashes the tokenizer's state, which changes with use.
    versions = (TOKENS_VERSION, transformers.__version__, datasets.__version__)
    tokens = pairs.map(
        _tokenize_batch,
        batched=True,
        batch_size=BATCH_ROWS,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=pairs.column_names,
        features=_TOKENS,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((pairs._fingerprint, tokenizer_key(tokenizer), versions)),
        desc="Tokenizing",
    )
    cut = tokens.with_format("numpy")["prompt_length"][:] > (max_prompt_length or np.inf)
    if cut.any():
        tokens = tokens.map(
            _cut_prompts,
            batched=True,
            input_columns="prompt_ids",
            fn_kwargs={"max_prompt_length": max_prompt_length},
            num_proc=num_proc,
            new_fingerprint=Hasher.hash((tokens._fingerprint, max_prompt_length)),
            desc="Cutting prompts",
        )
    columns = tokens.select_columns([name for name in _TOKENS if not name.endswith("_ids")]).with_format("numpy")[:]
    reasons = np.asarray(columns["dropped"], dtype=object)
    empty = (columns["chosen_length"] == 0) | (columns["rejected_length"] == 0)
    reasons[(reasons == "") & empty] = "empty_response"
    reasons[(reasons == "") & (columns["prompt_length"] >= (max_length or np.inf))] = "prompt_too_long"
    keep = reasons == ""
    counts = Counter(reasons[~keep].tolist())
    counts["prompt_cut"] = int(cut[keep].sum())
    counts["prompt_trimmed"] = int((columns["prompt_trimmed"][keep] > 0).sum())
    if not keep.all():
        if dropped_rows is not None:
            dropped_rows.append(list_dropped(tokens, reasons))
        tokens = tokens.select(np.flatnonzero(keep))
    return tokens.remove_columns("dropped"), counts


def load_token_pairs(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[Pairs, list[str]]:
    """The pairs of a run as token ids, train and eval split, and lines that say what happened to their prompts.

    Raises:
        UserError: as `load_pairs`; no pair of a split fits into max_length; too many were dropped.
    """
    args, pairs, notes = config.train, load_pairs(config), []
    for split in ("train", "eval"):
        texts = getattr(pairs, split)
        if texts is None:
            continue
        tokens, counts = tokenize_pairs(
            texts, tokenizer, args.max_length, args.max_prompt_length, args.dataset_num_proc, pairs.dropped_rows
        )
        tokens, filtered = filter_lengths(tokens, args, pairs.dropped_rows)
        counts.update(filtered)
        for key, text in {
            "prompt_cut": f"longer than max_prompt_length {args.max_prompt_length} and keep their end",
            "prompt_trimmed": "no token prefix of prompt+response; what follows the shared tokens is left out of them",
        }.items():
            if n := counts.pop(key):
                notes.append(f"{split}: {n:,} prompts are {text}")
        pairs.dropped.update(counts)
        if not len(tokens):
            reason, n = counts.most_common(1)[0]
            raise UserError(
                f"max_length {args.max_length}: no {split} pair of {', '.join(pairs.sources)} is left ({n} x "
                f"{DROP_REASONS[reason]}); raise max_length or set max_prompt_length, or change the filter or the data"
            )
        # Flat: or every rank would write the rest anew when the trainer adds columns
        # Upstream: datasets 5.2, arrow_dataset.py, Dataset.flatten_indices: writes a flat dataset anew, too, and no
        # public name says whether it is one. Canary: test_canary_datasets_indices
        setattr(pairs, split, tokens if tokens._indices is None else tokens.flatten_indices())
    pairs.check_dropped(args.max_dropped_fraction)
    for name, entry in read_eval_sets(args.eval_datasets).items():
        part, data = copy.copy(args), DatasetMixtureConfig([DatasetConfig(**entry)])
        for field in _OF_TRAINING:
            setattr(part, field, getattr(TrainConfig, field))
        try:
            loaded, texts = load_token_pairs(dataclasses.replace(config, train=part, data=data), tokenizer)
        except UserError as error:
            raise UserError(f"eval_datasets {name}: {error}") from error
        pairs.eval_sets[name] = loaded.train
        texts += [f": {n:,} of {loaded.rows:,} rows cannot be used"] if (n := loaded.dropped.total()) else []
        notes += [f"{name}: {text.partition(': ')[2]}" for text in texts]
    return pairs, notes


def pair_tokens(tokens: Dataset, max_length: int | None, prefix_sharing: bool = False) -> np.ndarray:
    """[N] computed tokens of each pair, chosen and rejected sequence together, after truncation to `max_length`."""
    columns = tokens.select_columns(["prompt_length", "chosen_length", "rejected_length"]).with_format("numpy")[:]
    return Lengths.from_columns(columns).truncate(max_length).computed(prefix_sharing)


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides the ids: vocabulary, merges, normaliser, special tokens, chat template."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend |= {"padding": None, "truncation": None}  # left behind by the last call with padding
        backend = json.dumps(backend)  # text is hashed twenty times as fast
    else:
        backend = tokenizer.get_vocab()
    return Hasher.hash((backend, tokenizer.chat_template, sorted(map(str, tokenizer.special_tokens_map.items()))))


def _tokenize_batch(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    texts = [_render(row, tokenizer) for row in rows]
    out: list[dict[str, Any]] = [{}] * len(rows)
    # Plain text gets the tokenizer's special tokens, a rendered chat template holds its own.
    for plain in {isinstance(row["prompt"], str) for row in rows}:
        group = [i for i, row in enumerate(rows) if isinstance(row["prompt"], str) is plain]
        flat = [text for i in group for text in texts[i] or [""] * 3]
        ids = tokenizer(flat, add_special_tokens=plain, return_attention_mask=False)["input_ids"]
        for n, i in enumerate(group):
            out[i] = _split_ids(*ids[3 * n : 3 * n + 3]) | {name: rows[i].get(name) for name in ("source", "row")}
            out[i] |= {} if texts[i] else {"dropped": "malformed"}
    return {name: [row[name] for row in out] for name in _TOKENS}


def _render(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """The texts of prompt, prompt+chosen and prompt+rejected; None where the chat template refuses the row."""
    prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
    if isinstance(prompt, str):
        eos = tokenizer.eos_token
        chosen, rejected = (side if side.endswith(eos) else side + eos for side in (chosen, rejected))
        return [prompt, prompt + chosen, prompt + rejected]
    if tokenizer.chat_template is None:
        raise UserError(
            f"model_name_or_path {tokenizer.name_or_path}: its tokenizer has no chat template, but the data are "
            "conversations; take a model with one, or put a chat_template.jinja into its folder"
        )
    arguments = json.loads(row.get("template") or "{}")
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **arguments)
    try:
        return [render(prompt, add_generation_prompt=True), render(prompt + chosen), render(prompt + rejected)]
    except TemplateSyntaxError as error:
        raise UserError(
            f"model_name_or_path {tokenizer.name_or_path}: line {error.lineno} of its chat template is no valid "
            f"Jinja: {error}; mend chat_template.jinja"
        ) from error
    except (TemplateError, TypeError):  # a template that refuses the roles, or their order
        return None


def _split_ids(prompt: list[int], prompt_chosen: list[int], prompt_rejected: list[int]) -> dict[str, Any]:
    """As in TRL: the responses start where the prompt stops being a prefix of prompt+response."""
    start = min(common_prefix_length(prompt, prompt_chosen), common_prefix_length(prompt, prompt_rejected))
    parts = dict(zip(_PARTS, (prompt[:start], prompt_chosen[start:], prompt_rejected[start:]), strict=True))
    # A template may leave out what made the two sides differ, or strip white space.
    row = {
        "prompt_trimmed": len(prompt) - start,
        "dropped": "chosen_equals_rejected" * (prompt_chosen == prompt_rejected),
    }
    return (
        row
        | {f"{part}_ids": ids for part, ids in parts.items()}
        | {f"{part}_length": len(ids) for part, ids in parts.items()}
    )


def _cut_prompts(prompts: list[list[int]], max_prompt_length: int) -> dict[str, list]:
    cut = [ids[-max_prompt_length:] for ids in prompts]
    return {"prompt_ids": cut, "prompt_length": [len(ids) for ids in cut]}
