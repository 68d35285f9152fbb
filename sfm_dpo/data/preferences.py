"""Preference pairs: rows of any published shape normalised, checked, mixed, sampled and split.

A usable row becomes {"prompt", "chosen", "rejected", "template", "source", "row"}. For conversations the first three
are message lists ({"role", "content", ...}), `prompt` being the shared beginning; for plain text they are strings.
`template` is JSON of further arguments of the chat template: the row's `tools` and `chat_template_kwargs`, as in TRL.
`row` is the row's number in its source, from 1: of a JSON Lines file the line, blank ones not counted.
"""

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Json, Value, concatenate_datasets
from datasets.fingerprint import Hasher
from trl.data_utils import common_prefix_length
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_atomically
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.config_checks import HELD_OUT
from sfm_dpo.data import json_rows
from sfm_dpo.data.filters import FILTER_REASONS, filter_pairs, judge_row, row_rules
from sfm_dpo.data.raw_shapes import check_columns, read_transcript
from sfm_dpo.data.sources import ACCOUNT, column_names, load_rows, room_in_cache

# Part of the cache's key. Raise it with any change of this module that changes a normalised row or its drop reason.
PAIRS_VERSION = 2

# Why a row cannot be used; the order is that of the table.
DROP_REASONS = {
    "malformed": "malformed: neither text nor messages that the chat template takes",
    "last_turn_not_assistant": "last turn is not the assistant's",
    "prompts_differ": "prompts of the two sides differ",
    "empty_response": "empty response",
    "chosen_equals_rejected": "chosen equals rejected",
    "prompt_too_long": "prompt leaves no room for a response within max_length",
} | FILTER_REASONS
TOOL_ROLES = ("tool", "environment")  # of messages that hold the result of a call
CALL_KEYS = ("tool_calls", "function_calls", "function_call")  # of an assistant's message
_PAIR = Features(
    {name: Json() for name in ("prompt", "chosen", "rejected")}
    | {name: Value("string") for name in ("template", "source", "dropped")}
    | {"row": Value("int64")}
)


@dataclass
class Pairs:
    """Usable pairs and the account of the rest.

    `train` and `eval` hold a row's columns (above); `eval` is None if nothing is held out.
    `rows` counts the rows read, `dropped` the unusable ones by reason (keys of DROP_REASONS); `dropped_rows` lists
    those, in datasets with the columns sources.ACCOUNT. `early_difference` is of find_early_difference. `eval_sets`
    are those of eval_datasets by name, for which nothing else here counts.
    """

    train: Dataset
    eval: Dataset | None
    sources: list[str]
    rows: int
    dropped: Counter = field(default_factory=Counter)
    dropped_rows: list[Dataset] = field(default_factory=list)
    early_difference: dict[str, Any] | None = None
    eval_sets: dict[str, Dataset] = field(default_factory=dict)

    def held_out(self) -> dict[str, Dataset]:
        """`eval` as HELD_OUT, where there is one, and `eval_sets`."""
        return ({} if self.eval is None else {HELD_OUT: self.eval}) | self.eval_sets

    def check_dropped(self, limit: float) -> None:
        """Raises UserError if no pair is left, or more than `limit` (a share of all rows) cannot be used; what filters
        leave out does not count."""
        total = sum(n for reason, n in self.dropped.items() if reason not in FILTER_REASONS)
        first, names = self.first_dropped(), ", ".join(self.sources)
        worst = ", ".join(f"{n} x {DROP_REASONS[key]} ({first.get(key)})" for key, n in self.dropped.most_common(3))
        if self.dropped.total() == self.rows:
            raise UserError(f"dataset_name {names}: none of its {self.rows} rows can be used ({worst})")
        if total > limit * self.rows:
            raise UserError(
                f"dataset_name {names}: {total} of {self.rows} rows cannot be used ({worst}); correct them "
                f"(analyze_dataset.py --dropped FILE lists them), or raise max_dropped_fraction {limit:g}"
            )

    def table(self) -> str:
        """The account as text, one line a reason."""
        rows: list[tuple[str, ...]] = [("source", ", ".join(self.sources)), ("rows", f"{self.rows:,}")]
        first = self.first_dropped()
        rows += [
            (f"dropped: {text}", f"{self.dropped[key]:,}", first.get(key, "")) for key, text in DROP_REASONS.items()
        ]
        rows += [("pairs to train on", f"{len(self.train):,}"), ("pairs held out", f"{len(self.eval or ()):,}")]
        rows += [(f"pairs held out: {name}", f"{len(pairs):,}") for name, pairs in self.eval_sets.items()]
        return format_table(row for row in rows if row[1] != "0")

    def first_dropped(self, count: int = 3) -> dict[str, str]:
        """The numbers of the first rows that were dropped, as text by reason."""
        first = {}
        for reason, rows in self._dropped_frame().groupby("dropped"):
            by_source = rows.head(count).groupby("source")["row"]
            lists = {source: ", ".join(map(str, numbers)) for source, numbers in by_source}
            named = [f"{text} of {source}" if len(self.sources) > 1 else text for source, text in lists.items()]
            first[reason] = "row" + "s" * (len(rows) > 1) + " " + "; ".join(named) + ", ..." * (len(rows) > count)
        return first

    def write_dropped(self, path: Path) -> None:
        """Writes a JSON line for each dropped row: row, reason (a key of DROP_REASONS) and source."""
        rows = self._dropped_frame().rename(columns={"dropped": "reason"}).to_dict("records")
        write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    def _dropped_frame(self) -> Any:
        """A pandas.DataFrame of the dropped rows in the order of their sources."""
        empty = Dataset.from_dict({name: [] for name in ACCOUNT}, ACCOUNT)
        return concatenate_datasets([empty, *self.dropped_rows]).to_pandas().sort_values(["source", "row"])

    def as_dict(self) -> dict[str, Any]:
        """The account for data.json."""
        return {
            "sources": self.sources,
            "rows": self.rows,
            "dropped": {reason: n for reason, n in self.dropped.items() if n},
            "train": len(self.train),
            "eval": len(self.eval or ()),
            "eval_sets": {name: len(pairs) for name, pairs in self.eval_sets.items()},
            # Upstream: datasets 5.2, arrow_dataset.py, Dataset: no public name for what its cache knows a dataset by,
            # which each key of this project starts from. Canary: test_canary_datasets_fingerprint
            "train_fingerprint": self.train._fingerprint,
        }


def load_pairs(config: Config) -> Pairs:
    """Loads `dataset_name` or the mixture `datasets`, drops what cannot be used, samples and splits.

    Raises:
        UserError: data not found, unreadable, without chosen/rejected, empty, or too much of it unusable.
    """
    args = config.train
    entries = config.data.datasets or [
        DatasetConfig(str(args.dataset_name), args.dataset_config, split=args.dataset_train_split)
    ]
    rules = row_rules(args.keep_values, args.filter_script)
    parts, dropped, rows, differs = [], [], 0, None
    for entry in entries:
        raw = load_rows(entry.path, entry.name, entry.split, entry.data_dir, entry.data_files)
        check_columns(raw, entry.path)
        if missing := set(rules.get("values", ())) - set(columns := column_names(raw)):
            raise UserError(
                f"keep_values {args.keep_values}: {entry.path} has no column {', '.join(sorted(missing))}; it has "
                f"{', '.join(columns)}"
            )
        part, part_dropped = normalize_rows(raw, entry.path, args.dataset_num_proc, rules)
        parts.append(part)
        dropped.append(part_dropped)
        rows += len(raw)
        differs = differs or find_early_difference(raw, part_dropped)

    sources = [entry.path for entry in entries]
    reasons = Counter(reason for part in dropped for reason in part["dropped"][:])
    pairs = Pairs(_mix(parts, [entry.fraction for entry in entries]), None, sources, rows, reasons, dropped, differs)
    if len(pairs.train):
        pairs.train, filtered = filter_pairs(pairs.train, args, pairs.dropped_rows)
        pairs.dropped += filtered
    pairs.check_dropped(args.max_dropped_fraction)
    if not len(pairs.train):
        raise UserError(f"datasets: the fractions leave no pair of {', '.join(sources)}")
    return _sample_and_split(pairs, args)


def find_early_difference(rows: Dataset, dropped: Dataset) -> dict[str, Any] | None:
    """The first of `rows` that was `dropped` as prompts_differ: `row`, `source`, how many messages both sides `shared`
    and from there on the beginnings of `chosen` and `rejected` as text; None where there is none."""
    reasons = dropped["dropped"][:]
    if "prompts_differ" not in reasons:
        return None
    found = dropped[reasons.index("prompts_differ")]
    row = rows[found["row"] - 1]
    row = json.loads(row[json_rows.COLUMN]) if json_rows.COLUMN in row else row
    sides, shared = [row["chosen"], row["rejected"]], 0
    if row.get("prompt") is None:
        sides = [read_transcript(side) or side for side in sides]
    if not all(isinstance(side, str) for side in sides):
        messages = [_read_messages(side, "assistant") or [] for side in sides]
        shared = common_prefix_length(*messages)
        sides = ["\n".join(f"{m['role']}: {m['content']}" for m in side[shared:]) for side in messages]
    texts = {"chosen": sides[0][:600], "rejected": sides[1][:600]}
    return {"row": found["row"], "source": found["source"], "shared": shared} | texts


@room_in_cache()
def normalize_rows(
    rows: Dataset, source: str, num_proc: int | None = None, rules: dict[str, Any] | None = None
) -> tuple[Dataset, Dataset]:
    """Usable pairs of `rows` in the form of this module's docstring, and the others (columns sources.ACCOUNT).

    `rules`: of filters.row_rules; what they leave out is among the others, too.
    """
    pairs = rows.map(
        _normalize_batch,
        batched=True,
        with_indices=True,
        fn_kwargs={"source": source, "rules": rules},
        remove_columns=rows.column_names,
        features=_PAIR,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((rows._fingerprint, source, PAIRS_VERSION, *([rules["key"]] if rules else []))),
        desc=f"Reading {source}",
    )
    usable = pairs.with_format("numpy")["dropped"][:] == ""
    dropped = pairs.select_columns(list(ACCOUNT)).select(np.flatnonzero(~usable))
    if len(dropped):
        pairs = pairs.select(np.flatnonzero(usable))
    return pairs.remove_columns("dropped"), dropped


def _normalize_batch(
    batch: dict[str, list], indices: list[int], source: str, rules: dict[str, Any] | None
) -> dict[str, list]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    if json_rows.COLUMN in batch:
        rows = [json.loads(row) for row in batch[json_rows.COLUMN]]
    reasons = [judge_row(row, **rules) if rules else "" for row in rows]
    rows = [_normalize_row(row) | {"source": source, "row": i + 1} for i, row in zip(indices, rows, strict=True)]
    for row, reason in zip(rows, reasons, strict=True):
        row["dropped"] = reason or row["dropped"]
    return {name: [row[name] for row in rows] for name in _PAIR}


def _normalize_row(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of _PAIR but `source` and `row`."""
    pair = normalize_pair(row.get("prompt"), row.get("chosen"), row.get("rejected"))
    template = None
    try:
        tools = row.get("tools")
        arguments = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
        arguments |= row.get("chat_template_kwargs") or {}
        if arguments := {name: value for name, value in arguments.items() if value is not None}:
            template = json.dumps(arguments)
    except (ValueError, TypeError):
        pair = "malformed"
    sides, reason = ([[]] * 3, pair) if isinstance(pair, str) else (pair, "")
    sides = [json.dumps(side) for side in sides]  # datasets 5.2 would take text that could be JSON for its value
    return dict(zip(("prompt", "chosen", "rejected"), sides, strict=True)) | {"template": template, "dropped": reason}


def normalize_pair(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any] | str:
    """One pair as (prompt, chosen, rejected), or the reason (a key of DROP_REASONS) why it cannot be used.

    Three shapes, as found in published sets: `prompt` text and message lists that hold the response alone
    (Dolci-Think); no `prompt` and whole conversations whose shared beginning is the prompt (Dolci-Instruct);
    plain strings, which become messages where they are transcripts of Human and Assistant.
    """
    if prompt is None:  # hh-rlhf's plain text
        chosen, rejected = read_transcript(chosen) or chosen, read_transcript(rejected) or rejected
    if isinstance(chosen, str) and isinstance(rejected, str) and (prompt is None or isinstance(prompt, str)):
        return _normalize_text(prompt, chosen, rejected)
    chosen, rejected = (_read_messages(side, "assistant") for side in (chosen, rejected))
    lead = _read_messages(prompt, "user") if prompt else []
    if chosen is None or rejected is None or lead is None:
        return "malformed"
    if not chosen or not rejected:
        return "empty_response"
    if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        return "last_turn_not_assistant"
    if chosen == rejected:
        return "chosen_equals_rejected"
    shared = common_prefix_length(chosen, rejected)  # in messages
    prompt = _join_prompts(lead, chosen[:shared])
    chosen, rejected = chosen[shared:], rejected[shared:]
    if any(message["role"] not in ("assistant", *TOOL_ROLES) for message in chosen + rejected):
        return "prompts_differ"
    if not chosen or not rejected or _is_empty(chosen[-1]) or _is_empty(rejected[-1]):
        return "empty_response"
    return (prompt, chosen, rejected) if prompt else "malformed"


def _join_prompts(lead: list[dict], shared: list[dict]) -> list[dict]:
    """The prompt column followed by the beginning that both sides share, without what is in both twice."""
    for overlap in range(min(len(lead), len(shared)), 0, -1):
        if lead[-overlap:] == shared[:overlap]:
            return lead + shared[overlap:]
    if shared and shared[0]["role"] in ("system", "user") and all(message["role"] == "user" for message in lead):
        return shared  # whole conversations, and a prompt column that repeats their question in another spelling
    return lead + shared


def _normalize_text(prompt: str | None, chosen: str, rejected: str) -> tuple[str, str, str] | str:
    if chosen == rejected:
        return "chosen_equals_rejected"
    if prompt is None:
        shared = os.path.commonprefix([chosen, rejected])  # noqa: RUF071 (of characters, indeed)
        # Cut at the last white space, so that the two responses start on whole words.
        prompt = re.sub(r"\S*\Z", "", shared).rstrip(" ")
        if not prompt:
            return "prompts_differ"
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not chosen.strip() or not rejected.strip():
        return "empty_response"
    return prompt, chosen, rejected


def _read_messages(value: Any, role: str) -> list[dict] | None:
    """A message list with text content and without keys that are None; None if it cannot be read as one."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        return None
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        content = message.get("content")
        if isinstance(content, list):  # parts, as in OpenAI's format
            parts = [part["text"] or "" if isinstance(part, dict) and "text" in part else part for part in content]
            if not all(isinstance(part, str) for part in parts):
                return None
            content = "".join(parts)
        if content is not None and not isinstance(content, str):
            return None
        extras = {k: v for k, v in message.items() if v is not None and k not in ("role", "content")}
        messages.append({"role": message["role"], "content": content or "", **extras})
    return messages


def _is_empty(message: dict) -> bool:
    # A response may be a call and no text
    return not message["content"].strip() and not any(message.get(key) for key in CALL_KEYS)


def _mix(parts: list[Dataset], fractions: list[float | None]) -> Dataset:
    """Concatenates; with fractions, the first rows of each so that nothing is repeated (as TRL's `get_dataset`)."""
    shares = [fraction for fraction in fractions if fraction is not None]  # all or none of them
    if shares:
        weights = [share / sum(shares) for share in shares]
        total = min(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        parts = [part.select(range(round(w * total))) for part, w in zip(parts, weights, strict=True)]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _sample_and_split(pairs: Pairs, args: TrainConfig) -> Pairs:
    if args.max_samples is not None and args.max_samples < len(pairs.train):
        pairs.train = pairs.train.shuffle(seed=args.seed).select(range(args.max_samples))
    if args.eval_fraction:
        held_out = round(len(pairs.train) * args.eval_fraction)
        if not 1 <= held_out < len(pairs.train):
            raise UserError(
                f"eval_fraction {args.eval_fraction:g} of {len(pairs.train)} pairs holds out {held_out}: "
                "at least 1 pair is needed on either side"
            )
        split = pairs.train.train_test_split(test_size=held_out, seed=args.seed)
        pairs.train, pairs.eval = split["train"], split["test"]
    return pairs
