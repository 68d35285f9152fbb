"""Common problems of preference data, found in the texts alone: cut answers, leaked tags, bad think blocks.

docs/internals/testing.md lists what each check finds, its misses and its false positives.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset

from sfm_dpo.data.pairs import PARTS, read_text
from sfm_dpo.data.preferences import TOOL_ROLES
from sfm_dpo.data.traits import find_traits

NOT_MODEL = ("system", *TOOL_ROLES)  # roles whose words are not the model's
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


def read_answers(pairs: Dataset, num_proc: int | None = None) -> dict[str, np.ndarray]:
    """For each name in CHECKS and TRAITS: whether it is found in the chosen and rejected answers, [N, 2] bool."""
    parts = list(PARTS)
    columns = pairs.select_columns(parts).map(
        _check_answers, remove_columns=parts, num_proc=num_proc, keep_in_memory=True, desc="Checking"
    )
    return columns.with_format("numpy")[:]


def find_faults(pairs: Dataset, answers: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """For each check that finds something in `answers` (from read_answers): the number of pairs, the number of
    answers on each side, and the first pair."""
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
    answers = [read_text(pair[side], NOT_MODEL) for side in ("chosen", "rejected")]
    found = {name: [bool(has(answer)) for answer in answers] for name, (has, _) in CHECKS.items()}
    if isinstance(pair["prompt"], list):
        turns = [[message["role"] for message in pair["prompt"][-1:] + pair[side]] for side in ("chosen", "rejected")]
        found["two_turns"] = [("assistant", "assistant") in pairwise(roles) for roles in turns]
    return found | find_traits(answers)
