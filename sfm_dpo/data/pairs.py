"""The pairs of a run, as texts and as token ids, and the rows that are left out, each with its reason."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import format_table, write_lines
from sfm_dpo.config.checks import HELD_OUT

PARTS = ("prompt", "chosen", "rejected")
# Why a row is left out
DROP_REASONS = {
    "malformed": "malformed: no text, messages (role, content) or tool calls",
    "refused": "cannot be rendered by the chat template",
    "prefill": "prompt ends in an assistant turn",
    "no_prompt": "no prompt: answers alone need one in the column prompt",
    "last_turn_not_assistant": "last turn is not the assistant's",
    "prompts_differ": "chosen and rejected have different prompts",
    "empty_response": "empty response",
    "chosen_equals_rejected": "chosen equals rejected",
    "not_printed": "chosen and rejected differ only in what the chat template does not print",
    "tool_results": "tool results cannot be told from the model's words (mask_tool_results: false trains on both)",
    "prompt_too_long": "prompt leaves no room for a response within max_length",
    "equal_after_cut": "chosen equals rejected once cut to max_length",
    "script": "rejected by filter_script",
    "duplicate": "repeats an earlier pair or prompt (drop_duplicates)",
    "too_long": "longer than max_length (overlong: drop)",
}
# What a row has and training does not see; the column `ignored` holds these keys and `key:part` of messages
IGNORED = {
    "system": "have a column system, which is not read; make it a message of the prompt",
    "prompt": "lose the beginning of their prompt by max_prompt_length",
}
HISTORY = "earlier_turns"  # the part of a prompt's assistant turns: some templates leave out their thoughts by design
FILTERS = ("script", "duplicate", "too_long")  # they drop usable pairs on request


@dataclass(frozen=True)
class Pairs:
    """Usable pairs in the columns of preferences.py or, as token ids, of tokenization.py; and the other rows."""

    splits: dict[str, Dataset]  # `train`, HELD_OUT with eval_fraction, and as token ids the sets of eval_datasets
    sources: list[str]
    rows: int  # number of rows read from `sources`
    dropped_rows: list[dict[str, Any]]  # row, source, and reason (a key of DROP_REASONS) with its detail
    template_date: str | None = None  # which strftime_now of the chat template tells

    @property
    def train(self) -> Dataset:
        return self.splits["train"]

    @property
    def dropped(self) -> Counter[str]:
        return Counter(row["reason"] for row in self.dropped_rows)

    def check_dropped(self, limit: float) -> None:
        """Raises UserError if a split is empty, or if more than `limit` of all rows are unusable; rows that filters
        drop do not count as unusable."""
        unusable = sum(n for reason, n in self.dropped.items() if reason not in FILTERS)
        empty = [name for name, split in self.splits.items() if not len(split)]
        if not empty and unusable <= limit * self.rows:
            return
        found = f"{unusable} of {self.rows} rows cannot be used"
        remedy = f"raise max_dropped_fraction {limit:g}"
        if empty:
            found = f"no {empty[0]} pair is left of {self.rows} rows"
            remedy = "change the filter, max_length, max_prompt_length or the data"
        worst = "; ".join(f"{n} x {self.explain(reason)}" for reason, n in self.dropped.most_common(3))
        raise UserError(
            f"dataset_name {', '.join(self.sources)}: {found} ({worst}); fix them (analyze_dataset.py --dropped FILE "
            f"lists them), or {remedy}"
        )

    def explain(self, reason: str) -> str:
        rows = (row for row in self.dropped_rows if row["reason"] == reason)  # in the order drawn
        first = min(rows, key=lambda row: row["row"])
        where = f"first in row {first['row']} of {first['source']}"
        return ": ".join(filter(None, [f"{DROP_REASONS[reason]}, {where}", first["detail"]]))

    def write_dropped(self, path: Path) -> None:
        write_lines(path, sorted(self.dropped_rows, key=lambda row: (row["source"], row["row"])))

    def write_steps(self, path: Path, steps: Iterable[np.ndarray]) -> None:
        """Writes source and rows of the pairs of each optimizer step as a JSON line; `steps`: their rows in train."""
        sources = self.train["source"][:]
        rows = self.train["row"][:]
        lines = []
        for number, of_step in enumerate(steps, 1):
            origins = defaultdict(list)
            for i in of_step:
                origins[sources[i]].append(rows[i])
            lines.append({"step": number, "rows": origins})
        write_lines(path, lines)

    def held_out(self) -> dict[str, Dataset]:
        return {name: tokens for name, tokens in self.splits.items() if name != "train"}

    def table(self) -> str:
        rows = [("source", ", ".join(self.sources)), ("rows", f"{self.rows:,}")]
        rows += [("dropped", f"{n:,}: {self.explain(reason)}") for reason, n in self.dropped.items()]
        used = len(self.train) + len(self.splits.get(HELD_OUT, ()))
        if undrawn := self.rows - len(self.dropped_rows) - used:
            rows.append(("not drawn (max_samples, fraction)", f"{undrawn:,}"))
        rows.append(("pairs to train on", f"{len(self.train):,}"))
        rows += [("caution", text) for text in describe_ignored(self.train).values()]
        rows += [(f"pairs held out: {name}", f"{len(tokens):,}") for name, tokens in self.held_out().items()]
        return format_table(rows)

    def as_dict(self) -> dict[str, Any]:
        counts = {name: len(tokens) for name, tokens in self.splits.items()}
        return {
            "sources": self.sources,
            "rows": self.rows,
            "dropped": dict(self.dropped),
            "train": counts.pop("train"),
            "eval": counts.pop(HELD_OUT, 0),
            "eval_sets": counts,
        }


def describe_ignored(tokens: Dataset) -> dict[str, str]:
    """What training does not see of the rows, by kind, each with the number of pairs and the first row."""
    found = defaultdict(list)
    for i, kinds in enumerate(tokens["ignored"][:]):
        for kind in kinds.split():
            found[kind].append(i)
    lines = {}
    for kind, rows in sorted(found.items()):
        key, _, part = kind.rpartition(":")
        text = IGNORED.get(kind, f"have {key} in {part} that the chat template does not print")
        first = min(tokens.select_columns(["row", "source"]).select(rows), key=lambda origin: origin["row"])
        lines[kind] = f"{len(rows):,} pairs {text}, first in row {first['row']} of {first['source']}"
    return lines


def drop_rows(rows: Dataset, reasons: np.ndarray) -> tuple[Dataset, list[dict[str, Any]]]:
    """The rows (with columns row and source) whose `reasons` [N] are empty; and the others, as in
    Pairs.dropped_rows. A reason may be followed by a colon and its detail."""
    others = np.flatnonzero(reasons != "")
    if not len(others):
        return rows, []
    dropped = rows.select_columns(["row", "source"]).select(others).to_list()
    for origin, text in zip(dropped, reasons[others].tolist(), strict=True):
        origin["reason"], _, origin["detail"] = text.partition(": ")
    return rows.select(np.flatnonzero(reasons == "")), dropped
