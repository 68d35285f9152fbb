"""Faults of answers, found in their texts (docs/verification.md states the precision); how the two sides differ."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset

from sfm_dpo.data.pairs import PARTS

LONG_ANSWER = 200  # characters: titles, names, formulas and one-line answers need no full stop
LONG_LINE = 60  # characters of a last line that is prose: items of lists and signatures are shorter
_ROLE_TAG = re.compile(
    r"<\|(?:im_start|im_end|user|assistant|system|eot_id|start_header_id|end_header_id|endoftext)\|>|"
    r"<</?SYS>>|\[/?INST\]|^ *(?:Human|Assistant|### (?:Instruction|Response)):",
    re.MULTILINE,
)
# An empty block or one that is not closed; a block that the generation prompt opens counts as opened
_BAD_THINK = re.compile(r"<think>(?:\s*</think>|(?!.*</think>))", re.DOTALL)
_ITEM = re.compile(r"\s*(?:[-*+>|#]|\d+[.)]|\t| {4})")


def is_cut(answer: str) -> bool:
    """Whether the answer ends inside a sentence of prose, or in an open code block."""
    text = answer.rstrip()
    if len(text) < LONG_ANSWER:
        return False
    if text.count("```") % 2:
        return True
    line = text[text.rfind("\n") + 1 :]
    is_prose = len(line) >= LONG_LINE and not _ITEM.match(line) and "://" not in line.split()[-1]
    is_unfinished = text[-1].isalnum() or text[-1] in ",;(-"
    return is_prose and is_unfinished


# For each check: a predicate on an answer, and what it finds
CHECKS: dict[str, tuple[Callable[[str], Any], str]] = {
    "cut": (is_cut, "the answer ends inside a sentence or a code block"),
    "role_tag": (_ROLE_TAG.search, "a role tag of a chat format is part of the answer"),
    "bad_think": (_BAD_THINK.search, "an empty think block, or one that is not closed"),
    "two_turns": (lambda answer: False, "two assistant turns in a row"),  # seen in the roles
}
SIDES = ("chosen", "rejected")
CELLS = {
    "tokens": "{chosen:,.0f} / {rejected:,.0f}",
    "base margin": "{difference:+.3f}, above 0 in {chosen_more:.0%}",
}


def find_faults(pairs: Dataset, num_proc: int | None = None) -> list[dict[str, Any]]:
    """For each check that finds something in the answers: the number of pairs, the number of answers on each side, and
    the first pair."""
    columns = pairs.select_columns(list(PARTS)).map(
        _check_answers, remove_columns=list(PARTS), num_proc=num_proc, keep_in_memory=True, desc="Checking"
    )
    answers = columns.with_format("numpy")[:]
    summary = []
    for name, (_, text) in CHECKS.items():
        found = answers[name]
        rows = np.flatnonzero(found.any(axis=1)).tolist()
        if rows:
            chosen, rejected = found.sum(axis=0).tolist()
            counts = {"pairs": len(rows), "chosen": chosen, "rejected": rejected}
            first = pairs[rows[0]]
            summary.append({"fault": name, "text": text, **counts, "row": first["row"], "source": first["source"]})
    return summary


def _check_answers(pair: dict[str, Any]) -> dict[str, list[bool]]:
    answers = [_read_text(pair[side]) for side in SIDES]
    found = {name: [bool(has(answer)) for answer in answers] for name, (has, _) in CHECKS.items()}
    if isinstance(pair["prompt"], list):
        turns = [[message["role"] for message in pair["prompt"][-1:] + pair[side]] for side in SIDES]
        found["two_turns"] = [("assistant", "assistant") in pairwise(roles) for roles in turns]
    return found


def _read_text(side: str | list[dict]) -> str:
    if isinstance(side, str):
        return side
    return "\n".join(message["content"] for message in side if message["role"] == "assistant")


def compare_sides(sources: np.ndarray, measures: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """For each of the 20 largest of the `sources` [N] its `pairs` and, of each measure (a key of CELLS; values of
    chosen and rejected [N, 2]), the means of both sides, their difference, and the share of pairs in which chosen has
    more."""
    rows = []
    for source, pairs in Counter(sources.tolist()).most_common(20):
        sides = {}
        for name, values in measures.items():
            mine = values[sources == source].astype(float)
            gap = mine[:, 0] - mine[:, 1]
            means = {"chosen": mine[:, 0].mean(), "rejected": mine[:, 1].mean(), "difference": gap.mean()}
            sides[name] = means | {"chosen_more": (gap > 0).mean()}
        rows.append({"source": source, "pairs": pairs, "sides": sides})
    return rows


def tabulate_sides(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of cells; the first row holds the headings."""
    table = [["source (chosen / rejected)", "pairs", *rows[0]["sides"]]]
    for row in rows:
        cells = [CELLS[name].format(**values) for name, values in row["sides"].items()]
        table.append([row["source"], f"{row['pairs']:,}", *cells])
    return table
