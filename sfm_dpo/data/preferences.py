"""Preference pairs: rows of any published dataset format are normalised, filtered, mixed, sampled and split.

A usable row has `prompt`, `chosen` and `rejected`: message lists ({"role", "content", ...}), or strings of plain text;
`template`, JSON of its `tools` and `chat_template_kwargs`, as in TRL; `source` and `row`, the dataset and the row's
number in it, from 1; `ignored`, keys of pairs.IGNORED; and `prompt_key` and `pair_key`, hashes that identify repeats.
"""

import functools
import json
import logging
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from datasets import Dataset, Features, Json, Value, concatenate_datasets
from datasets.fingerprint import Hasher
from trl.data_utils import common_prefix_length
from trl.scripts.utils import DatasetConfig
from trl.trainer.utils import remove_none_values

from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.config.checks import HELD_OUT
from sfm_dpo.config.fields import Config
from sfm_dpo.data.pairs import PARTS, Pairs, drop_rows
from sfm_dpo.data.sources import JSON_COLUMN, column_names, explain_cache_errors, load_rows

# Part of the cache's key. Raise it when a change to this module changes a normalised row or its drop reason.
PAIRS_VERSION = 12
TOOL_ROLES = ("tool", "environment")  # they hold the result of a call
CALL_KEYS = ("tool_calls", "function_calls", "function_call")  # of an assistant's message
# Other names of the column `prompt`
PROMPT_COLUMNS = ("conversations", "messages", "question", "instruction", "query", "context", "input", "history")
_FIELDS = (*PARTS, *PROMPT_COLUMNS, "tools", "chat_template_kwargs", "system")
_PAIR = Features(
    {name: Json() for name in PARTS}
    | {name: Value("string") for name in ("template", "source", "dropped", "ignored", "prompt_key", "pair_key")}
    | {"row": Value("int64")}
)
_ROLES = {"system": "system", "tool": "tool", "observation": "tool"}
_ROLES |= dict.fromkeys(("user", "human", "prompter"), "user")
_ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai"), "assistant")
# Text that begins as messages do, in JSON ("role") or as Python prints them ('role')
_MESSAGES = re.compile(
    rf"""\s*\[?\s*{{\s*(?P<quote>['"]).*?\b(role|from)(?P=quote)\s*:\s*['"]({"|".join(_ROLES)})\b""", re.DOTALL | re.I
)
_TURN = re.compile(r"\n\n(Human|Assistant):")  # of a transcript

log = logging.getLogger(__name__)


def list_sources(config: Config) -> list[DatasetConfig]:
    args = config.train
    single = DatasetConfig(str(args.dataset_name), args.dataset_config, split=args.dataset_train_split)
    return config.data.datasets or [single]


def load_pairs(config: Config) -> Pairs:
    """Reads `dataset_name` or the mixture `datasets`, filters, samples and splits. Raises UserError for what
    cannot be read or split."""
    args = config.train
    pairs = read_pairs(list_sources(config), args.dataset_num_proc, args.filter_script)
    train = pairs.train
    repeats: list[dict[str, Any]] = []
    if args.drop_duplicates != "no":
        key = "prompt_key" if args.drop_duplicates == "prompts" else "pair_key"
        is_repeat = train.select_columns(key).to_pandas().duplicated().to_numpy()
        train, repeats = drop_rows(train, np.where(is_repeat, "duplicate", ""))
    if args.max_samples is not None and args.max_samples < len(train):
        drawn = np.random.default_rng(args.seed).permutation(len(train))[: args.max_samples]  # as Dataset.shuffle
        train = train.select(drawn)
    splits = {"train": train}
    if args.eval_fraction and len(train):
        splits = _split_by_prompt(train, args.eval_fraction, args.seed)
    return replace(pairs, splits=splits, dropped_rows=pairs.dropped_rows + repeats)


@functools.cache
def load_keep(script: str) -> Callable[[dict], Any]:
    with user_input(f"filter_script {script}", "write a file with def keep(row): return True"):
        return runpy.run_path(script)["keep"]


def _split_by_prompt(pairs: Dataset, fraction: float, seed: int) -> dict[str, Dataset]:
    """`pairs` in random order; HELD_OUT has the prompts of the first pairs, until it holds `fraction` of all pairs."""
    drawn = np.random.default_rng(seed).permutation(len(pairs))  # as `train_test_split` of datasets
    keys = pairs.select_columns("prompt_key").to_pandas()["prompt_key"].iloc[drawn]
    sizes = keys.value_counts(sort=False)  # by prompt, in the order drawn
    held_out = sizes.index[sizes.cumsum() - sizes < round(len(pairs) * fraction)]
    is_held_out = keys.isin(held_out).to_numpy()
    if not 0 < is_held_out.sum() < len(pairs):
        found = f"{is_held_out.sum()} of {len(pairs)} pairs would be held out, of {len(sizes)} prompts"
        raise UserError(f"eval_fraction {fraction:g}: {found}; change it, or use more pairs")
    return {"train": pairs.select(drawn[~is_held_out]), HELD_OUT: pairs.select(drawn[is_held_out])}


def read_pairs(entries: Sequence[DatasetConfig], num_proc: int | None, script: str | None = None) -> Pairs:
    """The usable pairs of datasets, mixed by their fractions, as the split `train`; `script`: a filter_script. Raises
    UserError for what cannot be read, and for columns that are missing."""
    if script:
        load_keep(script)
    parts: list[Dataset] = []
    dropped: list[dict[str, Any]] = []
    count = 0
    for entry in entries:
        rows = load_rows(entry)
        columns = column_names(rows)
        if missing := [name for name in ("chosen", "rejected") if name not in columns]:
            raise UserError(
                f"dataset_name {entry.path}: no column {' or '.join(missing)}; it has {', '.join(columns)}; rename "
                "a column, or make pairs of scored answers (docs/data.md)"
            )
        part, unusable = _normalize_rows(rows, entry.path, num_proc, script)
        parts.append(part)
        dropped += unusable
        count += len(rows)
    shares = [entry.fraction for entry in entries if entry.fraction is not None]  # set for all entries or for none
    if shares:  # takes the first rows of each, so that none is repeated, as in TRL's `get_dataset`
        weights = [share / sum(shares) for share in shares]
        total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        parts = [part.select(range(round(w * total))) for part, w in zip(parts, weights, strict=True)]
    train = parts[0] if len(parts) == 1 else concatenate_datasets(parts)
    return Pairs({"train": train}, [entry.path for entry in entries], count, dropped)


@explain_cache_errors()
def _normalize_rows(
    rows: Dataset, source: str, num_proc: int | None, script: str | None
) -> tuple[Dataset, list[dict[str, Any]]]:
    """Usable pairs of `rows`; and the others, as in Pairs.dropped_rows, with those that filter_script rejects."""
    log.info(f"reading {source}: {len(rows):,} rows")
    with user_input(f"filter_script {script}: keep(row) uses what cannot be cached", "create that in it"):
        code = Hasher.hash(load_keep(script)) if script else ""  # with its globals, such as a list read from a file
    # Upstream: datasets 5.2, arrow_dataset.py, Dataset: no public name for the fingerprint that its cache uses, from
    # which this project derives its keys. Canary: test_canary_datasets_fingerprint
    key = Hasher.hash((rows._fingerprint, source, PAIRS_VERSION, code))
    if not script:  # other columns may be images that cannot be decoded
        rows = rows.select_columns([name for name in rows.column_names if name in (*_FIELDS, JSON_COLUMN)])
    pairs = rows.map(
        _normalize_row,
        with_indices=True,
        fn_kwargs={"source": source, "script": script},
        remove_columns=rows.column_names,
        features=_PAIR,
        num_proc=num_proc,
        new_fingerprint=key,
        desc=f"Reading {source}",
    )
    usable, dropped = drop_rows(pairs, pairs.with_format("numpy")["dropped"][:])
    return usable.remove_columns("dropped"), dropped


def _normalize_row(stored: Mapping[str, Any], index: int, source: str, script: str | None) -> dict[str, Any]:
    is_json = JSON_COLUMN in stored
    row = json.loads(stored[JSON_COLUMN]) if is_json else dict(stored)
    template = None
    try:
        # Arrow gives every struct of a column the keys of all others
        fields = row if is_json else remove_none_values({name: row.get(name) for name in _FIELDS})
        pair = normalize_fields(fields)
        given = (fields.get(name) or None for name in ("tools", "chat_template_kwargs"))
        tools, options = (json.loads(value) if isinstance(value, str) else value for value in given)
        if arguments := ({"tools": tools} if tools else {}) | (options or {}):
            template = json.dumps(arguments)
    except (ValueError, TypeError) as error:
        pair = f"malformed: {error}"
    dropped = pair if isinstance(pair, str) else ""
    sides: tuple[Any, Any, Any] = ([], [], []) if isinstance(pair, str) else pair
    if script:
        remedy = f"correct keep(row) for the row {_as_json(row)[:300]}"
        with user_input(f"filter_script {script}", remedy):
            dropped = dropped if load_keep(script)(row) else "script"
    # Written as JSON here, because datasets 5.2 would parse text that happens to be valid JSON
    columns: dict[str, Any] = {name: _as_json(side) for name, side in zip(PARTS, sides, strict=True)}
    columns |= {"prompt_key": _hash(sides[0], template), "pair_key": _hash(*sides, template)}
    system = row.get("system")
    is_ignored = system and sides[0][:1] != [{"role": "system", "content": system}]
    columns |= {"source": source, "row": index + 1, "ignored": "system" if is_ignored else ""}
    return columns | {"template": template, "dropped": dropped}


def _hash(*values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(_as_json(values).encode())


def _as_json(value: Any) -> str:
    return json.dumps(value, default=str)  # a Parquet file may hold dates and decimals


def normalize_fields(fields: Mapping[str, Any]) -> tuple[Any, Any, Any] | str:
    """`normalize_pair` of a row. Answers without a prompt take it from one of PROMPT_COLUMNS, after `system`, if it
    alone is there, ends with a user turn and holds no answer."""
    answers = (fields.get("chosen"), fields.get("rejected"))
    found = {name: fields[name] for name in PROMPT_COLUMNS if fields.get(name)}
    prompt = fields.get("prompt")
    pair = normalize_pair(None if found and not prompt else prompt, *answers)
    if pair != "no_prompt" or not found:
        return pair
    names = " and ".join(found)
    if found.keys() == {"instruction", "input"}:  # joined as in LLaMA-Factory
        found = {"prompt": "\n".join(found.values())}
    if len(found) > 1:
        return f"no_prompt: {names} look like it; rename one of them to prompt"
    messages = _read_messages(read_json(read_transcript(*found.values())), "user")
    last = messages and messages[-1]["role"]
    if messages and last == "user":
        if fields.get("system") and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": str(fields["system"])})
        pair = normalize_pair(messages, *answers)
        if isinstance(pair, str) or not any(turn in messages for turn in pair[1] + pair[2]):
            return pair
    return f"no_prompt: {names} holds an answer or ends with the role {last!r}; end it with a user turn"


def normalize_pair(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any] | str:
    """One pair as (prompt, chosen, rejected), or the reason, as in drop_rows, why it cannot be used.

    Published sets have four formats: `prompt` text and message lists with the response alone (Dolci-Think); no
    `prompt`, and conversations whose shared beginning is the prompt (Dolci-Instruct); the same as transcripts
    (hh-rlhf); and plain text. Message lists may be JSON text. Raises ValueError for calls and lists that are not.
    """
    prompt, chosen, rejected = map(read_json, (prompt, chosen, rejected))
    chosen, rejected = map(read_transcript, (chosen, rejected))
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        if chosen == rejected:
            return "chosen_equals_rejected"
        if not chosen.strip() or not rejected.strip():
            return "empty_response"
        return prompt, chosen, rejected
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        return "no_prompt"
    chosen, rejected = (_read_messages(side, "assistant") for side in (chosen, rejected))
    prompt_messages = _read_messages(prompt, "user") if prompt else []
    if chosen is None or rejected is None or prompt_messages is None:
        return "malformed"
    if not chosen or not rejected:
        return "empty_response"
    for role in (chosen[-1]["role"], rejected[-1]["role"]):
        if role != "assistant":
            return f"last_turn_not_assistant: its role is {role!r}"
    if chosen == rejected:
        return "chosen_equals_rejected"
    common = common_prefix_length(chosen, rejected)  # in messages
    prompt = _join_prompts(prompt_messages, chosen[:common])
    chosen = chosen[common:]
    rejected = rejected[common:]
    for message in chosen + rejected:
        if message["role"] not in ("assistant", *TOOL_ROLES):
            return f"prompts_differ: in a turn of the role {message['role']!r}"
    if not chosen or not rejected or _is_empty(chosen[-1]) or _is_empty(rejected[-1]):
        return "empty_response"
    return (prompt, chosen, rejected) if prompt else "no_prompt"


def read_json(text: Any) -> Any:
    """Messages of JSON text, as an export to plain columns writes them; anything else is returned unchanged. Raises
    ValueError for messages as Python prints them."""
    found = _MESSAGES.match(text) if isinstance(text, str) else None
    if found and found["quote"] == "'" and text.rstrip().endswith(("]", "}")):
        raise ValueError("messages as Python prints them are not JSON; write the column with json.dumps")
    with suppress(ValueError, TypeError):
        value = json.loads(text) if found else text
        turns = value if isinstance(value, list) else [value]
        contents = {"content", *CALL_KEYS}
        if found and all(("role" in turn and contents & {*turn}) or {"from", "value"} <= {*turn} for turn in turns):
            return turns
    return text


def read_transcript(text: Any) -> Any:
    """Messages of text such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"; anything else is returned unchanged."""
    if not isinstance(text, str) or not text.startswith("\n\nHuman:"):
        return text
    parts = _TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    messages = [{"role": roles[who], "content": content.strip()} for who, content in turns]
    # A prompt ends with an empty assistant turn
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages


def _join_prompts(prompt_messages: list[dict], common: list[dict]) -> list[dict]:
    """The prompt column followed by the messages that both sides share, without repeating messages: full conversations
    may repeat it in another spelling, and without a system message."""
    for overlap in range(min(len(prompt_messages), len(common)), 0, -1):
        if prompt_messages[-overlap:] == common[:overlap]:
            return prompt_messages + common[overlap:]
    if common and prompt_messages[: len(common)] == common:  # it holds an answer, too, so the pair will be dropped
        return prompt_messages
    is_asked = prompt_messages and prompt_messages[-1]["role"] == "user"
    if is_asked and common and common[0]["role"] in ("system", "user"):
        lacks_system = prompt_messages[0]["role"] == "system" != common[0]["role"]
        return prompt_messages[: max(len(prompt_messages) - len(common), lacks_system)] + common
    return prompt_messages + common


def _read_messages(value: Any, role: str) -> list[dict] | None:
    """A message list with text content and parsed tool calls, without a message's keys that are None; None if `value`
    is not such a list."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):  # LLaMA-Factory's ranked answers
        value = [value]
    if not isinstance(value, list):
        return None
    messages = []
    for message in value:
        if isinstance(message, dict) and {"from", "value"} <= message.keys():
            message = {"role": message["from"], "content": message["value"]}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        message = {name: item for name, item in message.items() if item is not None}
        message["role"] = _ROLES.get(message["role"].strip(" :").lower(), message["role"])
        texts = [message.get("content", "")]
        if isinstance(texts[0], list):  # parts, as of multimodal models
            texts = [part.get("text") if isinstance(part, dict) else None for part in texts[0]]
        if not all(isinstance(text, str) for text in texts):
            return None
        first = {"role": message["role"], "content": "".join(texts)}
        messages.append(first | message | first)
        if calls := message.get("tool_calls"):
            messages[-1]["tool_calls"] = read_calls(calls)
    return messages


def read_calls(calls: Any) -> list[Any]:
    """Tool calls from a list, or from JSON text, with arguments as mappings. Raises ValueError for other text."""
    calls = json.loads(calls) if isinstance(calls, str) else calls
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return calls


def _is_empty(message: dict) -> bool:
    # A response may consist of a call without text
    return not message["content"].strip() and not any(message.get(key) for key in CALL_KEYS)
