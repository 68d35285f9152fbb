"""Preference pairs: rows of any published shape normalised, checked, mixed, sampled and split.

A usable row becomes {"prompt", "chosen", "rejected", "template", "source"}. For conversations the first three are
message lists ({"role", "content", ...}), `prompt` being the shared beginning; for plain text they are strings.
`template` is JSON of further arguments of the chat template: the row's `tools` and `chat_template_kwargs`, as in TRL.
"""

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, Features, Json, Value, concatenate_datasets
from datasets.fingerprint import Hasher
from trl.data_utils import common_prefix_length
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import Config, TrainConfig
from sfm_dpo.data.filters import FILTER_REASONS, filter_pairs, judge_row, row_rules
from sfm_dpo.data.sources import load_rows, room_in_cache

# Part of the cache's key. Raise it with any change of this module that changes a normalised row or its drop reason.
PAIRS_VERSION = 1

# Why a row cannot be used; the order is that of the table.
DROP_REASONS = {
    "malformed": "malformed: neither text nor messages that the chat template takes",
    "last_turn_not_assistant": "last turn is not the assistant's",
    "prompts_differ": "prompts of the two sides differ",
    "empty_response": "empty response",
    "chosen_equals_rejected": "chosen equals rejected",
    "prompt_too_long": "prompt leaves no room for a response within max_length",
} | FILTER_REASONS
_PAIR = Features(
    {name: Json() for name in ("prompt", "chosen", "rejected")}
    | {name: Value("string") for name in ("template", "source", "dropped")}
)


@dataclass
class Pairs:
    """Usable pairs and the account of the rest.

    `train` and `eval` hold a row's five columns (above); `eval` is None if nothing is held out.
    `rows` counts the rows read, `dropped` the unusable ones by reason (keys of DROP_REASONS).
    """

    train: Dataset
    eval: Dataset | None
    sources: list[str]
    rows: int
    dropped: Counter = field(default_factory=Counter)

    def check_dropped(self, limit: float) -> None:
        """Raises UserError if no pair is left, or more than `limit` (a share of all rows) cannot be used; what filters
        leave out does not count."""
        total = sum(n for reason, n in self.dropped.items() if reason not in FILTER_REASONS)
        worst = ", ".join(f"{n} x {DROP_REASONS[reason]}" for reason, n in self.dropped.most_common(3))
        names = ", ".join(self.sources)
        if self.dropped.total() == self.rows:
            raise UserError(f"dataset_name {names}: none of its {self.rows} rows can be used ({worst})")
        if total > limit * self.rows:
            raise UserError(
                f"dataset_name {names}: {total} of {self.rows} rows cannot be used ({worst}); correct them, or raise "
                f"max_dropped_fraction {limit:g}"
            )

    def table(self) -> str:
        """The account as text, one line a reason."""
        rows = [("source", ", ".join(self.sources)), ("rows", f"{self.rows:,}")]
        rows += [(f"dropped: {text}", f"{self.dropped[key]:,}") for key, text in DROP_REASONS.items()]
        rows += [("pairs to train on", f"{len(self.train):,}"), ("pairs held out", f"{len(self.eval or ()):,}")]
        return format_table(row for row in rows if row[1] != "0")

    def as_dict(self) -> dict[str, Any]:
        """The account for data.json."""
        return {
            "sources": self.sources,
            "rows": self.rows,
            "dropped": {reason: n for reason, n in self.dropped.items() if n},
            "train": len(self.train),
            "eval": len(self.eval or ()),
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
    parts, rows = [], 0
    dropped: Counter[str] = Counter()
    for entry in entries:
        raw = load_rows(entry.path, entry.name, entry.split, entry.data_dir, entry.data_files)
        if missing := set(rules.get("values", ())) - set(raw.column_names):
            raise UserError(
                f"keep_values {args.keep_values}: {entry.path} has no column {', '.join(sorted(missing))}; it has "
                f"{', '.join(raw.column_names)}"
            )
        try:
            part, part_dropped = normalize_rows(raw, entry.path, args.dataset_num_proc, rules)
        except UnicodeDecodeError as error:  # pyarrow reads the bytes of a JSON file as they are
            raise UserError(f"dataset_name {entry.path}: is not UTF-8: {error}") from error
        rows, dropped = rows + len(raw), dropped + part_dropped
        parts.append(part)

    sources = [entry.path for entry in entries]
    pairs = Pairs(_mix(parts, [entry.fraction for entry in entries]), None, sources, rows, dropped)
    if len(pairs.train):
        pairs.train, filtered = filter_pairs(pairs.train, args)
        pairs.dropped += filtered
    pairs.check_dropped(args.max_dropped_fraction)
    if not len(pairs.train):
        raise UserError(f"datasets: the fractions leave no pair of {', '.join(sources)}")
    return _sample_and_split(pairs, args)


@room_in_cache()
def normalize_rows(
    rows: Dataset, source: str, num_proc: int | None = None, rules: dict[str, Any] | None = None
) -> tuple[Dataset, Counter]:
    """Usable pairs of `rows` in the form of this module's docstring, and the count of the others by reason.

    `rules`: of filters.row_rules; what they leave out is counted, too.
    """
    pairs = rows.map(
        _normalize_batch,
        batched=True,
        fn_kwargs={"source": source, "rules": rules},
        remove_columns=rows.column_names,
        features=_PAIR,
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((rows._fingerprint, source, PAIRS_VERSION, *([rules["key"]] if rules else []))),
        desc=f"Reading {source}",
    )
    reasons = pairs.data.column("dropped").to_pylist()
    dropped = Counter(reason for reason in reasons if reason)
    if dropped:
        pairs = pairs.select([i for i, reason in enumerate(reasons) if not reason])
    return pairs.remove_columns("dropped"), dropped


def _normalize_batch(batch: dict[str, list], source: str, rules: dict[str, Any] | None) -> dict[str, list]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    reasons = [judge_row(row, **rules) if rules else "" for row in rows]
    rows = [_normalize_row(row) | {"source": source} for row in rows]
    for row, reason in zip(rows, reasons, strict=True):
        row["dropped"] = reason or row["dropped"]
    return {name: [row[name] for row in rows] for name in _PAIR}


def _normalize_row(row: dict[str, Any]) -> dict[str, Any]:
    """The columns of _PAIR but `source`."""
    pair, template = normalize_pair(row.get("prompt"), row["chosen"], row["rejected"]), None
    try:
        tools = row.get("tools")
        arguments = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
        arguments |= row.get("chat_template_kwargs") or {}
        if arguments := {name: value for name, value in arguments.items() if value is not None}:
            template = json.dumps(arguments)
    except (ValueError, TypeError):
        pair = "malformed"
    sides, reason = ([[]] * 3, pair) if isinstance(pair, str) else (pair, "")
    # datasets 5.2 would take text that happens to be JSON, such as 42 or {}, for its content
    sides = [json.dumps(side) if isinstance(side, str) else side for side in sides]
    return dict(zip(("prompt", "chosen", "rejected"), sides, strict=True)) | {"template": template, "dropped": reason}


def normalize_pair(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any] | str:
    """One pair as (prompt, chosen, rejected), or the reason (a key of DROP_REASONS) why it cannot be used.

    Three shapes, as found in published sets: `prompt` text and message lists that hold the response alone
    (Dolci-Think); no `prompt` and whole conversations whose shared beginning is the prompt (Dolci-Instruct);
    plain strings.
    """
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
    if any(message["role"] not in ("assistant", "tool", "environment") for message in chosen + rejected):
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
    calls = ("tool_calls", "function_calls", "function_call")  # a response may be a call and no text
    return not message["content"].strip() and not any(message.get(key) for key in calls)


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
