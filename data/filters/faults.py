"""A filter_script: leaves out pairs of which an answer holds a role tag of a chat format, has a reasoning block that
is empty or not closed, or ends inside a sentence or a code block. To count and list them:

    python scripts/analyze_dataset.py DATASET --filter_script data/filters/faults.py --dropped faults.jsonl
"""

import re

LONG_ANSWER = 200  # characters: titles, names, formulas and one-line answers need no full stop
LONG_LINE = 60  # characters of a last line that is prose: items of lists and signatures are shorter
ROLE_TAG = re.compile(
    r"<\|(?:im_start|im_end|user|assistant|system|eot_id|start_header_id|end_header_id|endoftext)\|>|"
    r"<</?SYS>>|\[/?INST\]|^ *(?:Human|Assistant|### (?:Instruction|Response)):",
    re.MULTILINE,
)
# A block that the generation prompt opens counts as opened
BAD_THINK = re.compile(r"<think>(?:\s*</think>|(?!.*</think>))", re.DOTALL)
ITEM = re.compile(r"\s*(?:[-*+>|#]|\d+[.)]|\t| {4})")


def is_cut(answer):
    text = answer.rstrip()
    if len(text) < LONG_ANSWER:
        return False
    if text.count("```") % 2:
        return True
    line = text[text.rfind("\n") + 1 :]
    is_prose = len(line) >= LONG_LINE and not ITEM.match(line) and "://" not in line.split()[-1]
    return is_prose and (text[-1].isalnum() or text[-1] in ",;(-")


def read_answer(side):
    """The last message of a side as text; conversations of Dolci are message lists, other sets have text."""
    message = side[-1] if isinstance(side, list) and side else side
    text = message.get("content") if isinstance(message, dict) else message
    return text if isinstance(text, str) else ""


def keep(row):
    answers = [read_answer(row[side]) for side in ("chosen", "rejected")]
    return not any(ROLE_TAG.search(text) or BAD_THINK.search(text) or is_cut(text) for text in answers)
