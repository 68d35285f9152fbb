"""Datasets of scored or ranked answers, from which scripts/make_pairs.py makes pairs; and transcripts.

docs/data.md lists the datasets.
"""

import json
import math
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from datasets import Dataset

from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.data import json_rows
from sfm_dpo.data.sources import column_names

# Columns that identify a dataset format; docs/data.md lists those of the answers within a row
FORMATS = (
    ("prompt", "responses", "scores"),
    ("instruction", "completions"),  # UltraFeedback
    ("prompt", "answers"),  # Nectar
    ("prompt", "response"),  # one row for each answer: HelpSteer
)
SCORES = ("score", "overall_score", "rank", "helpfulness")  # the first of them in an answer is that of `--by score`
_TURN = re.compile(r"\n\n(Human|Assistant):")


def pair_rows(rows: Dataset, source: str, by: str, margin: float = 0.0) -> Iterator[dict[str, Any] | None]:
    """Yields for each prompt a row with the best answer as chosen and the worst as rejected, or None if all are equal.

    `by`: name of the score, or "score" for the overall score; `margin`: minimum difference of the two scores. Raises
    UserError for an unknown dataset format, or a row that does not have it.
    """
    columns = column_names(rows)
    found = next((names for names in FORMATS if set(names) <= set(columns)), None)
    if found is None:
        known = "; ".join(", ".join(names) for names in FORMATS)
        raise UserError(f"{source}: unknown dataset format with columns {', '.join(columns)}; supported are: {known}")
    read = (json.loads(row[json_rows.COLUMN]) if json_rows.COLUMN in row else row for row in rows)
    if "response" in found:  # neighbouring rows share a prompt
        prompts = (list(group) for _, group in groupby(read, key=lambda row: row.get("prompt")))
    else:
        prompts = ([row] for row in read)
    for group in prompts:
        with user_input(f"{source}: a row is malformed", "fix it"):
            pair = _pair_answers(group, by, margin)
        yield pair


def _pair_answers(rows: list[dict[str, Any]], by: str, margin: float) -> dict[str, Any] | None:
    """`rows`: a single row with all answers to a prompt, or one row for each answer."""
    row = rows[0]
    answers = row.get("completions", row.get("answers", rows))
    if "responses" in row:
        both = zip(row["responses"], row["scores"], strict=True)
        answers = [{"response": response, "score": score} for response, score in both]
    text = "answer" if "answers" in row else "response"
    names = SCORES if by == "score" and answers else ()
    score = next((name for name in names if name in answers[0]), by)
    sign = -1 if score == "rank" else 1  # rank 1 is the best
    scored = [(sign * float(a[score]), a[text]) for a in answers if a.get(score) is not None and a[text]]
    scored = [item for item in scored if math.isfinite(item[0])]
    if not scored:
        return None
    scored.sort(key=lambda item: item[0], reverse=True)
    high, chosen = scored[0]
    low, rejected = scored[-1]
    if high == low or high - low < margin or chosen == rejected:
        return None
    messages = read_transcript(row["instruction"] if "instruction" in row else row["prompt"])
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"prompt": messages, "chosen": chosen, "rejected": rejected}


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
