"""What preference data get wrong, found in the texts alone: refusals, cut answers, leaked tags, damaged encoding.

A check is a function (answer, other, prompt) -> position of the evidence in `answer`, or None; `other` is the pair's
other response and `prompt` the last message before them. docs/filters.md has what each finds, misses
and names falsely.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets.fingerprint import Hasher

from sfm_dpo.data.preferences import PARTS, read_text
from sfm_dpo.data.sources import explain_cache_errors

# Part of the cache's key. Raise it when a check finds something else.
FAULTS_VERSION = 2

SAME_START = 200  # characters, some 50 tokens: two answers share a stock phrase, never that much by chance
OPENING = 160  # characters in which a refusal refuses: later words such as "cannot help" are part of an answer
LONG_ANSWER = 200  # characters: titles, names, formulas and one-line answers need no full stop
LONG_LINE = 60  # characters of a last line that is prose: items of lists and signatures are shorter
QUOTED_PROMPT = 60  # characters: answers take up a short question in their own sentence
# A class first, which re finds several times as fast as alternatives; "\n" is before the text as well
_REFUSAL = re.compile(
    r"[IiAa](?<!\w.)(?i:(?<=i)(?:(?:['’]m| am) (?:unable|not able) to\b| must (?:decline|refuse)\b|"
    r"(?:['’]m| am) not comfortable\b|"
    r" (?:can ?not|can['’]t|won['’]t|will not) (?:help|assist|provide|comply|answer|fulfil|discuss|engage|create|"
    r"write|generate|give|support|participate|continue|offer|share|do that)\b)|"
    r"(?<=a)s an ai\b[^.]{0,60}\bi (?:can|do|am)\b)"
)
_MARKDOWN = re.compile(r"[`*\n](?:(?<=`)``|(?<=\*)\*\w[^*\n]*\*\*|(?<=\n)(?:#{1,6} |\s*[-*+] |\s*\d+[.)] )\S)")
_EMOJI = re.compile("[\U0001f300-\U0001faff\u2600-\u27bf]")
_ROLE_TAG = re.compile(
    r"[<\[\n](?:(?<=<)\|(?:im_start|im_end|user|assistant|system|eot_id|start_header_id|end_header_id|endoftext)\|>|"
    r"(?<=<)</?SYS>>|(?<=\[)/?INST\]|(?<=\n)(?:Human|Assistant|### (?:Instruction|Response)):)"
)
_EMPTY_THINK = re.compile(r"<think>\s*</think>")
# UTF-8 read as Latin-1 or Windows-1252, control characters that no text has, and what a decoder puts for a bad byte
_MOJIBAKE = re.compile(
    "[\x80-\x9f\ufffd\u00c2\u00c3\u00e2\u00ef](?:(?<=[\x80-\x9f\ufffd])|(?<=[\u00c2\u00c3])[\x80-\xbf\u2018-\u2122]|"
    "(?<=\u00e2)[\x80-\x9f\u20ac]|(?<=\u00ef)\u00bf\u00bd)"
)
_ITEM = re.compile(r"\s*(?:[-*+>|#]|\d+[.)]|\t| {4})")


Check = Callable[[str, str, str], int | None]


def search(pattern: re.Pattern, end: int | None = None, alone: bool = False, ascii: bool = True) -> Check:
    """The check that looks for a pattern, in the first `end` characters; `alone`: only where the other has none;
    `ascii`: whether it can be in a text of ASCII alone."""

    def find(answer: str, other: str, prompt: str) -> int | None:
        match = pattern.search("\n" + answer[:end]) if ascii or not answer.isascii() else None
        return max(match.start() - 1, 0) if match and not (alone and pattern.search("\n" + other)) else None

    return find


def find_same_start(answer: str, other: str, prompt: str) -> int | None:
    return 0 if len(answer) >= SAME_START and answer[:SAME_START] == other[:SAME_START] else None


def find_cut(answer: str, other: str, prompt: str) -> int | None:
    """An answer that ends inside a sentence of prose, or in an open code block."""
    text = answer.rstrip()
    if len(text) < LONG_ANSWER:
        return None
    line = text[text.rfind("\n") + 1 :]
    prose = len(line) >= LONG_LINE and not _ITEM.match(line) and "://" not in line.split()[-1]
    return len(text) if (prose and (text[-1].isalnum() or text[-1] in ",;(-")) or text.count("```") % 2 else None


def find_bad_think(answer: str, other: str, prompt: str) -> int | None:
    """A think block without content, or that is not closed; one that the generation prompt opens is."""
    opened = answer.rfind("<think>")
    if opened > answer.rfind("</think>"):
        return opened
    match = _EMPTY_THINK.search(answer) if opened >= 0 else None
    return match.start() if match else None


def find_prompt(answer: str, other: str, prompt: str) -> int | None:
    found = answer.find(prompt.strip()) if len(prompt.strip()) >= QUOTED_PROMPT else -1
    return found if found >= 0 else None


CHECKS: dict[str, tuple[Check, str]] = {
    "same_start": (find_same_start, f"both answers start with the same {SAME_START} characters: they teach nothing"),
    "refusal": (search(_REFUSAL, end=OPENING), "the answer refuses"),
    "cut": (find_cut, "the answer ends inside a sentence or a code block"),
    "markdown": (search(_MARKDOWN, alone=True), "Markdown in this answer alone: DPO learns the format"),
    "emoji": (search(_EMOJI, alone=True, ascii=False), "emoji in this answer alone: DPO learns the format"),
    "role_tag": (search(_ROLE_TAG), "a role tag of a chat format is part of the answer"),
    "bad_think": (find_bad_think, "an empty think block, or one that is not closed"),
    "repeats_prompt": (find_prompt, f"the answer holds the whole prompt (of {QUOTED_PROMPT} characters and more)"),
    "mojibake": (search(_MOJIBAKE, ascii=False), "damaged encoding"),
}


def read_sides(pair: dict[str, Any]) -> tuple[str, str, str]:
    """Texts of a pair (preferences.py): the last message of the prompt, chosen, rejected."""
    prompt = pair["prompt"] if isinstance(pair["prompt"], str) else pair["prompt"][-1]["content"]
    return prompt, read_text(pair["chosen"]), read_text(pair["rejected"])


@explain_cache_errors()
def find_faults(pairs: Dataset, num_proc: int | None = None) -> dict[str, np.ndarray]:
    """[N] uint8 for each of CHECKS: 1 where it finds something in the chosen answer, 2 in the rejected, 3 in both."""
    return pairs.map(
        _check_batch,
        batched=True,
        batch_size=200,
        remove_columns=pairs.column_names,
        features=Features({name: Value("uint8") for name in CHECKS}),
        num_proc=num_proc,
        new_fingerprint=Hasher.hash((pairs._fingerprint, "faults", FAULTS_VERSION)),
        desc="Checking",
    ).with_format("numpy")[:]


def _check_batch(batch: dict[str, list]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in CHECKS}
    for sides in zip(*(batch[name] for name in PARTS), strict=True):
        prompt, chosen, rejected = read_sides(dict(zip(PARTS, sides, strict=True)))
        for name, (find, _) in CHECKS.items():
            in_chosen = find(chosen, rejected, prompt) is not None
            found[name].append(in_chosen + 2 * (find(rejected, chosen, prompt) is not None))
    return found


def summarize_faults(pairs: Dataset, faults: dict[str, np.ndarray], examples: int = 3) -> list[dict[str, Any]]:
    """Of each check that found something: pairs, answers by side, and examples with the text around the evidence."""
    rows = []
    for name, (find, text) in CHECKS.items():
        where = np.flatnonzero(faults[name])
        shown = []
        for row in where[:: max(1, len(where) // examples)][:examples].tolist():
            prompt, *answers = read_sides(pairs[row])
            side = 0 if faults[name][row] & 1 else 1
            at = find(answers[side], answers[1 - side], prompt) or 0
            excerpt = answers[side][max(0, at - 150) : at + 150]
            shown.append({"row": row, "side": ("chosen", "rejected")[side], "prompt": prompt[-200:], "text": excerpt})
        if len(where):
            counts = {side: int((faults[name] & bit > 0).sum()) for side, bit in (("chosen", 1), ("rejected", 2))}
            rows.append({"fault": name, "text": text, "pairs": len(where)} | counts | {"examples": shown})
    return rows
