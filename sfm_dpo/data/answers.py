"""What answers contain, found in their texts alone: faults, and traits in which chosen and rejected answers differ.

docs/verification.md states the precision of the checks.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from datasets import Dataset

from sfm_dpo.data.pairs import PARTS, read_text
from sfm_dpo.data.preferences import TOOL_ROLES

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
# Searched only in the first 160 characters: later, "cannot help" may be part of an answer
_DECLINES = re.compile(
    r"\A.{0,160}?\b(?:"
    r"I(?: can ?not| can['’]t| won['’]t| will not|(?:['’]m| am) (?:unable|not able) to) "
    r"(?:help(?! (?:but|it)\b)|assist|provide|comply|answer|fulfill?|discuss|engage|create|write|generate|give|"
    r"support|participate|continue|offer|suggest|encourage|promote|recommend|condone|do (?:that|this))\b|"
    r"I must (?:decline|refuse)\b|I(?:['’]m| am) not comfortable\b|I (?:do not|don['’]t) condone\b)",
    re.DOTALL | re.IGNORECASE,
)
_OTHER_LETTER = re.compile(r"[^\W\d_A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ]")  # letters that are not Latin


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
# For each trait: a predicate on an answer without its think block
TRAITS: dict[str, Callable[[str], Any]] = {
    "declines": _DECLINES.search,
    "link": re.compile(r"https?://\w|\bwww\.\w").search,
    "fenced block": re.compile(r"```.*```", re.DOTALL).search,
    "list": lambda text: len(re.findall(r"^[ \t]*(?:[-*+•]|\d+[.)])[ \t]+\S", text, re.M)) >= 3,
    "other script": lambda text: 3 * len(_OTHER_LETTER.findall(text)) > len(text),
}
SIDES = ("chosen", "rejected")
CELLS = dict.fromkeys(TRAITS, "{chosen:.1%} / {rejected:.1%}") | {
    "tokens": "{chosen:,.0f} / {rejected:,.0f}",
    "base margin": "{difference:+.3f}, above 0 in {chosen_more:.0%}",
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


def find_traits(answers: Sequence[str]) -> dict[str, list[bool]]:
    texts = [answer.rpartition("</think>")[2] for answer in answers]
    return {name: [bool(has(text)) for text in texts] for name, has in TRAITS.items()}


def compare_sides(values: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> list[dict[str, Any]]:
    """For each of the 20 largest sources its `pairs` and, by trait or measure, the means of both sides, their
    difference, and the share of pairs in which each side has more.

    `values`: by trait or measure, the sources of N pairs [N] and the values of chosen and rejected [N, 2]. Traits may
    cover only a sample, so `pairs` counts those of the last measure."""
    sources, _ = min(values.values(), key=lambda value: len(value[0]))
    rows = []
    for source, _ in Counter(sources.tolist()).most_common(20):
        sides = {}
        for name, (source_of, both) in values.items():
            mine = both[source_of == source].astype(float)
            gap = mine[:, 0] - mine[:, 1]
            means = {"chosen": mine[:, 0].mean(), "rejected": mine[:, 1].mean(), "difference": gap.mean()}
            shares = {"chosen_more": (gap > 0).mean(), "rejected_more": (gap < 0).mean()}
            sides[name] = means | shares
        rows.append({"source": source, "pairs": len(gap), "sides": sides})
    return rows


def tabulate_sides(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of cells; the first row holds the headings. A trait that no answer has is left out."""
    names = [name for name in rows[0]["sides"] if any(row["sides"][name][side] for row in rows for side in SIDES)]
    table = [["source (chosen / rejected)", "pairs", "only rejected declines", *names]]
    for row in rows:
        cells = [CELLS[name].format(**row["sides"][name]) for name in names]
        table.append([row["source"], f"{row['pairs']:,}", f"{row['sides']['declines']['rejected_more']:.1%}", *cells])
    return table
