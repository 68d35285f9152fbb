"""Tokenization: preference pairs to prompt_ids, chosen_ids and rejected_ids, batched, parallel and cached on disk.

The ids are those of TRL's own preparation (`DPOTrainer._prepare_dataset`), which tokenises one row at a time and
whose cache key covers every training argument.
"""

import copy
import dataclasses
import functools
import itertools
import json
import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import datasets
import numpy as np
import transformers
import xxhash
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
from sfm_dpo.data.preferences import PARTS, TOOL_ROLES, Pairs, load_pairs
from sfm_dpo.data.sources import drop_rows, explain_cache_errors

# Part of the cache's key. Raise it when a change to this module changes an id, a length or a drop reason.
TOKENS_VERSION = 6
# Rows per tokenizer call: it needs about 300 bytes per token besides the ids, and a long pair has 50,000 tokens.
BATCH_ROWS = 100
# Fields that select the pairs to train on. They do not apply to eval_datasets.
TRAIN_ONLY_FIELDS = "eval_datasets eval_fraction max_samples filter_script drop_duplicates drop_contaminated".split()
_TOKENS = Features(
    {f"{part}_ids": List(Value("int32")) for part in PARTS}
    | {f"{part}_length": Value("int32") for part in PARTS}
    | {"shared_length": Value("int32")}  # number of first tokens that both responses share
    | {"control_tokens": Value("bool")}  # whether its texts contain special tokens, which act like the template's own
    | {"masked": List(List(Value("int32")))}  # spans of tool results: side (0 chosen, 1 rejected), first id, end
    | {"prompt_trimmed": Value("int32")}  # tokens cut from the prompt's end, where prompt+response diverges
    | {"source": Value("string"), "row": Value("int64"), "dropped": Value("string")}
)

log = logging.getLogger(__name__)


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's own folder or repository, with a pad token. Raises UserError if it cannot be
    loaded or has no EOS token."""
    name = config.model.model_name_or_path
    options = {"revision": config.model.model_revision, "trust_remote_code": config.train.trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # a damaged tokenizer.json raises a plain Exception
        raise UserError(f"{config.model_field} {name}: cannot load a tokenizer: {error}; check its files") from error
    if tokenizer.eos_token is None:
        raise UserError(f"{config.model_field} {name}: its tokenizer has no EOS token; set eos_token in its config")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_token_pairs(config: Config, tokenizer: PreTrainedTokenizerBase) -> Pairs:
    """The pairs of a run as token ids: train and eval split, and the sets of eval_datasets."""
    args = config.train
    pairs = load_pairs(config)
    pairs.train = _tokenize_split("train", pairs.train, pairs, args, tokenizer)
    if pairs.eval is not None:
        pairs.eval = _tokenize_split("eval", pairs.eval, pairs, args, tokenizer)
    pairs.check_dropped(args.max_dropped_fraction)
    pairs.control_tokens = int(np.sum(pairs.train["control_tokens"][:]))
    for name, entry in read_eval_sets(args.eval_datasets).items():
        eval_args = copy.copy(args)
        for field in TRAIN_ONLY_FIELDS:
            setattr(eval_args, field, getattr(TrainConfig, field))
        data = DatasetMixtureConfig([DatasetConfig(**entry)])
        try:
            loaded = load_token_pairs(dataclasses.replace(config, train=eval_args, data=data), tokenizer)
        except UserError as error:
            raise UserError(f"eval_datasets {name}: {error}") from error
        if loaded.dropped_rows:
            log.info(f"{name}: {len(loaded.dropped_rows):,} of {loaded.rows:,} rows are left out")
        pairs.eval_sets[name] = loaded.train
    return pairs


def _tokenize_split(
    split: str, texts: Dataset, pairs: Pairs, args: TrainConfig, tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    """Token ids of a split of `pairs`, to whose dropped rows it adds."""
    names = "max_length max_prompt_length overlong control_tokens mask_tool_results".split()
    fields = {name: getattr(args, name) for name in names}
    tokens, dropped = tokenize_pairs(texts, tokenizer, num_proc=args.dataset_num_proc, **fields)
    pairs.dropped_rows += dropped
    responses = Lengths.of(tokens).truncate(args.max_length).responses
    masked = responses - count_trained(tokens, args.max_length)
    if masked.any():
        rows = masked.any(axis=1).sum()
        share = masked.sum() / responses.sum()
        log.info(f"{rows:,} {split} pairs have tool results ({share:.1%} of response tokens), which are not trained")
    if not len(tokens):
        counts = ", ".join(f"{n} x {reason}" for reason, n in Counter(row["reason"] for row in dropped).items())
        raise UserError(
            f"max_length {args.max_length}: no {split} pair of {', '.join(pairs.sources)} is left ({counts}); raise "
            "max_length or set max_prompt_length, or change the filter or the data"
        )
    # Flattened here: otherwise every rank would rewrite the rows when the trainer adds columns
    # Upstream: datasets 5.2, arrow_dataset.py, Dataset.flatten_indices: rewrites even a flat dataset, and no public
    # name says whether it is flat. Canary: test_canary_datasets_indices
    return tokens if tokens._indices is None else tokens.flatten_indices()


@explain_cache_errors()
def tokenize_pairs(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    max_prompt_length: int | None = None,
    num_proc: int | None = None,
    overlong: str = "truncate",
    control_tokens: str = "accept",
    mask_tool_results: bool = True,
) -> tuple[Dataset, list[dict[str, Any]]]:
    """The columns of _TOKENS except `dropped` for `pairs` (preferences.py), and the unusable rows, as in
    Pairs.dropped_rows.

    A second call with the same pairs and tokenizer reads the cache, whatever the lengths. TRL's collator truncates to
    `max_length`; here it only drops pairs whose prompt fills it or, with `overlong` drop, all longer pairs. Raises
    UserError if a pair is longer and `overlong` is error.
    """
    log.info(f"tokenizing {len(pairs):,} pairs")
    # Replaces datasets' own key, which hashes the tokenizer's state, and that changes with use.
    versions = (TOKENS_VERSION, transformers.__version__, datasets.__version__)
    key = [pairs._fingerprint, tokenizer_key(tokenizer), versions, mask_tool_results]
    if control_tokens == "sanitize":
        key.append(control_tokens)
    tokens = pairs.map(
        _tokenize_batch,
        batched=True,
        batch_size=BATCH_ROWS,
        fn_kwargs={
            "tokenizer": tokenizer,
            "mask_tool_results": mask_tool_results,
            "sanitize": control_tokens == "sanitize",
        },
        remove_columns=pairs.column_names,
        features=_TOKENS,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash(tuple(key)),
        desc="Tokenizing",
    )
    longer = tokens.with_format("numpy")["prompt_length"][:] > (max_prompt_length or np.inf)
    if max_prompt_length and longer.any():
        log.info(f"{longer.sum():,} prompts exceed max_prompt_length {max_prompt_length} and keep their end")
        cut = functools.partial(_cut_prompts, max_prompt_length=max_prompt_length)
        tokens = tokens.map(
            cut,
            batched=True,
            input_columns="prompt_ids",
            num_proc=num_proc,
            new_fingerprint=Hasher.hash((tokens._fingerprint, max_prompt_length)),
        )
    names = ["prompt_length", "chosen_length", "rejected_length", "dropped", "control_tokens"]
    columns = tokens.select_columns(names).with_format("numpy")[:]
    reasons = np.asarray(columns["dropped"], dtype=object)
    empty = (columns["chosen_length"] == 0) | (columns["rejected_length"] == 0)
    reasons[(reasons == "") & empty] = "empty_response"
    if control_tokens != "accept":  # sanitized ones have none left; plain text cannot be sanitized
        reasons[(reasons == "") & columns["control_tokens"]] = "control_tokens"
    if max_length is not None:
        lengths = Lengths.from_columns(columns)
        longer = (reasons == "") & ~lengths.fit(max_length)
        if overlong == "error" and longer.any():
            raise UserError(
                f"overlong error: {longer.sum():,} of {len(pairs):,} pairs are longer than max_length {max_length}, "
                f"the longest has {lengths.total[longer].max():,} tokens; raise max_length, set max_prompt_length, "
                "remove them, or choose overlong: truncate or drop"
            )
        if overlong == "drop":
            reasons[longer] = "too_long"
        is_untrained = count_trained(tokens, max_length).min(axis=1) == 0
        reasons[(reasons == "") & is_untrained] = "prompt_too_long"
    usable, dropped = drop_rows(tokens, reasons)
    return usable.remove_columns("dropped"), dropped


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all that determines the ids: vocabulary, merges, normaliser, special tokens, chat template."""
    if tokenizer.is_fast:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend |= {"padding": None, "truncation": None}  # left behind by the last call with padding
        backend = json.dumps(backend)  # hashing text is twenty times as fast
    else:
        backend = tokenizer.get_vocab()
    return Hasher.hash((backend, tokenizer.chat_template, sorted(map(str, tokenizer.special_tokens_map.items()))))


def _tokenize_batch(
    batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, mask_tool_results: bool, sanitize: bool
) -> dict[str, list]:
    pairs = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    control_tokens = re.compile("|".join(map(re.escape, special | {tokenizer.eos_token})))
    rows = []
    for is_text, neighbours in itertools.groupby(pairs, key=lambda pair: isinstance(pair["prompt"], str)):
        group = list(neighbours)
        texts = [_render(pair, tokenizer) for pair in group]
        flat = [text for sides in texts for text in sides or ("", "", "")]
        # Plain text gets the tokenizer's special tokens; a rendered chat template already has them.
        ids = tokenizer(flat, add_special_tokens=is_text, return_attention_mask=False)["input_ids"]
        for n, pair in enumerate(group):
            row = _split_ids(*ids[3 * n : 3 * n + 3]) | {"source": pair.get("source"), "row": pair.get("row")}
            row["control_tokens"] = any(map(control_tokens.search, _list_texts(pair, tokenizer.eos_token)))
            rendered = texts[n]
            is_sanitized = sanitize and row["control_tokens"] and rendered is not None and not is_text
            if is_sanitized:
                row |= _split_ids(*_encode_sanitized(pair, tokenizer)) | {"control_tokens": False}
            if rendered is None:
                row["dropped"] = "malformed"
            elif mask_tool_results and not is_text:
                try:
                    row["masked"] = _find_tool_results(pair, rendered, row["prompt_length"], tokenizer)
                    if is_sanitized and row["masked"]:  # its tokens differ from those of the rendered text
                        row["dropped"] = "tool_results"
                except (TemplateError, TypeError, ValueError, NotImplementedError):
                    row["dropped"] = row["dropped"] or "tool_results"
            rows.append(row)
    return {name: [row[name] for row in rows] for name in _TOKENS}


def _list_texts(pair: dict[str, Any], eos: str) -> list[str]:
    """Texts written by users or models: messages with their calls, or plain text without the EOS of a response."""
    if isinstance(pair["prompt"], str):
        return [pair["prompt"], pair["chosen"].removesuffix(eos), pair["rejected"].removesuffix(eos)]
    return [json.dumps(pair[part], ensure_ascii=False) for part in PARTS]


def _render(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str] | None:
    """The texts of prompt, prompt+chosen and prompt+rejected; None if the chat template refuses the row."""
    prompt, chosen, rejected = (row[part] for part in PARTS)
    if isinstance(prompt, str):
        eos = tokenizer.eos_token
        chosen, rejected = (side if side.endswith(eos) else side + eos for side in (chosen, rejected))
        return prompt, prompt + chosen, prompt + rejected
    if tokenizer.chat_template is None:
        raise UserError(
            f"model_name_or_path {tokenizer.name_or_path}: its tokenizer has no chat template, but the data are "
            "conversations; put a chat_template.jinja into its folder"
        )
    try:
        render = _renderer(row, tokenizer)
        return render(prompt, add_generation_prompt=True), render(prompt + chosen), render(prompt + rejected)
    except TemplateSyntaxError as error:
        where = f"model_name_or_path {tokenizer.name_or_path}: its chat template, line {error.lineno}"
        raise UserError(f"{where}: {error}") from error
    except (TemplateError, TypeError, ValueError):  # a template that refuses the roles, their order or the tools
        return None


def _renderer(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    arguments = json.loads(row.get("template") or "{}")
    return functools.partial(tokenizer.apply_chat_template, tokenize=False, **arguments)


def _encode_sanitized(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of prompt, prompt+chosen and prompt+rejected; special tokens of the messages are ordinary text."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_control_tokens = []  # only special tokens: a template's <think> stays a token
    render = _renderer(row, tokenizer)
    encode = functools.partial(render, tokenize=True, sanitize_control_tokens=True, return_dict=False)
    prompt, chosen, rejected = (row[part] for part in PARTS)
    return [encode(prompt, add_generation_prompt=True), encode(prompt + chosen), encode(prompt + rejected)]


def _find_tool_results(
    pair: dict[str, Any], texts: tuple[str, str, str], prompt_length: int, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """The column `masked` of a pair with rendered `texts`: tool results, and the header of the next turn, which the
    model does not write either. Raises TemplateError if the template changes a turn when others follow, and
    NotImplementedError for a tokenizer without offsets."""
    spans = []
    render = _renderer(pair, tokenizer)
    for side, part in enumerate(PARTS[1:]):
        if all(message["role"] not in TOOL_ROLES for message in pair[part]):
            continue
        text = texts[1 + side]
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        token_begins = [begin for begin, _ in offsets]
        messages = pair["prompt"] + pair[part]
        end = 0
        for is_result, turns in itertools.groupby(messages, key=lambda message: message["role"] in TOOL_ROLES):
            begin = end
            end += len(list(turns))
            if is_result and end > len(pair["prompt"]):
                call = render(messages[:begin])
                if is_last_end := not text.startswith(call):  # OLMo 3's template ends only the last turn by EOS
                    call = call.removesuffix(tokenizer.eos_token)
                if not text.startswith(call) or not text.startswith(render(messages[:end])):
                    raise TemplateError("the template changes a turn when others follow")
                header = render(messages[:end], add_generation_prompt=True)
                # The model writes the token that ends the call
                span = (len(call) + is_last_end, common_prefix_length(header, text))
                spans.append([side, *(max(0, bisect_left(token_begins, at) - prompt_length) for at in span)])
    return spans


def _split_ids(prompt: list[int], prompt_chosen: list[int], prompt_rejected: list[int]) -> dict[str, Any]:
    """As in TRL, the responses start where the prompt stops being a prefix of prompt+response."""
    start = min(common_prefix_length(prompt, prompt_chosen), common_prefix_length(prompt, prompt_rejected))
    ids = {"prompt": prompt[:start], "chosen": prompt_chosen[start:], "rejected": prompt_rejected[start:]}
    row: dict[str, Any] = {f"{part}_ids": ids[part] for part in PARTS}
    row |= {f"{part}_length": len(ids[part]) for part in PARTS}
    row["shared_length"] = common_prefix_length(ids["chosen"], ids["rejected"])
    row["masked"] = []
    row["prompt_trimmed"] = len(prompt) - start
    # A template may strip white space or leave out the text in which the two sides differ.
    row["dropped"] = "chosen_equals_rejected" if prompt_chosen == prompt_rejected else ""
    return row


def _cut_prompts(prompts: list[list[int]], max_prompt_length: int) -> dict[str, list]:
    cut = [ids[-max_prompt_length:] for ids in prompts]
    return {"prompt_ids": cut, "prompt_length": [len(ids) for ids in cut]}


def hash_tokens(dataset: Dataset) -> str:
    """Hash of the ids of all rows, in order, and of the masked spans."""
    digest = xxhash.xxh3_128()
    columns = [name for name in ("prompt_ids", "chosen_ids", "rejected_ids", "masked") if name in dataset.column_names]
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=1000):
        for name in columns:
            column = table.column(name).combine_chunks()
            values = column.flatten(recursive=True).to_numpy()
            if name == "masked" and not len(values):
                continue  # without tool results the hash equals that of versions that did not mask them
            digest.update(np.ascontiguousarray(column.value_lengths().to_numpy()).tobytes())
            digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of N pairs, each field [N] int64; `shared` counts the tokens with which both responses begin."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, tokens: Dataset) -> "Lengths":
        names = [name for name in tokens.column_names if name.endswith("_length")]
        return cls.from_columns(tokens.select_columns(names).with_format("numpy")[:])

    @classmethod
    def from_columns(cls, columns: Mapping[str, np.ndarray]) -> "Lengths":
        """From the columns prompt_length, chosen_length, rejected_length and shared_length (0 if missing)."""
        prompt, chosen, rejected = (columns[f"{name}_length"].astype(np.int64) for name in PARTS)
        shared = columns.get("shared_length", np.zeros_like(prompt))
        return cls(prompt, chosen, rejected, shared.astype(np.int64))

    @property
    def total(self) -> np.ndarray:
        """[N] tokens of the longer sequence."""
        return self.sequences.max(axis=1)

    @property
    def sequences(self) -> np.ndarray:
        """[N, 2] tokens of prompt + chosen and prompt + rejected."""
        return np.stack([self.prompt + self.chosen, self.prompt + self.rejected], axis=1)

    def computed(self, prefix_sharing: bool) -> np.ndarray:
        """[N] tokens of both sequences; with prefix sharing, the prompt except its last token counts once."""
        return self.sequences.sum(axis=1) - prefix_sharing * np.maximum(self.prompt - 1, 0)

    @property
    def responses(self) -> np.ndarray:
        """[N, 2] tokens of chosen and rejected, which are trained."""
        return np.stack([self.chosen, self.rejected], axis=1)

    def __len__(self) -> int:
        return len(self.prompt)

    def truncate(self, max_length: int | None, max_prompt_length: int | None = None) -> "Lengths":
        """The last `max_prompt_length` tokens of each prompt, then the first `max_length` of each sequence."""
        prompt = self.prompt if max_prompt_length is None else np.minimum(self.prompt, max_prompt_length)
        if max_length is None:
            return Lengths(prompt, self.chosen, self.rejected, self.shared)
        prompt = np.minimum(prompt, max_length)
        left = max_length - prompt
        return Lengths(prompt, *(np.minimum(side, left) for side in (self.chosen, self.rejected, self.shared)))

    def fit(self, max_length: int | None, max_prompt_length: int | None = None) -> np.ndarray:
        """[N] bool: whether both sequences have at most `max_length` tokens, the prompt cut to `max_prompt_length`."""
        return self.truncate(None, max_prompt_length).total <= (max_length or np.inf)

    def used(self, max_length: int | None, max_prompt_length: int | None, overlong: str) -> np.ndarray:
        """[N] bool: the pairs that training uses: with `overlong` drop those that fit, otherwise those that keep at
        least one response token."""
        if overlong == "drop":
            return self.fit(max_length, max_prompt_length)
        return self.truncate(max_length, max_prompt_length).responses.max(axis=1) > 0

    def select(self, rows: np.ndarray) -> "Lengths":
        """The pairs selected by a mask [N] or by indices."""
        return Lengths(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def count_trained(tokens: Dataset, max_length: int | None, max_prompt_length: int | None = None) -> np.ndarray:
    """[N, 2] tokens of chosen and rejected after truncation, without those of tool results."""
    kept = Lengths.of(tokens).truncate(max_length, max_prompt_length)
    counts = kept.responses
    if "masked" in tokens.column_names:
        spans = tokens.select_columns("masked").with_format("arrow")[:].column("masked").combine_chunks()
        rows = np.repeat(np.arange(len(tokens)), spans.value_lengths().to_numpy())
        side, first, end = spans.flatten(recursive=True).to_numpy().reshape(-1, 3).T
        room = (max_length or np.iinfo(np.int32).max) - kept.prompt[rows]
        np.subtract.at(counts, (rows, side), np.minimum(end, room) - np.minimum(first, room))
    return counts
