"""Preference sets of scored or ranked answers, whose rows scripts/make_pairs.py makes into pairs; and transcripts.

docs/data.md lists the sets.
"""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from datasets import Dataset

from sfm_dpo.common.errors import UserError
from sfm_dpo.data import json_rows
from sfm_dpo.data.sources import column_names

# Columns by which a set is known, and the score that --by score takes
SHAPES = {
    ("instruction", "completions"): "overall_score",  # UltraFeedback
    ("prompt", "answers"): "rank",  # Nectar
    ("prompt", "response", "helpfulness"): "helpfulness",  # HelpSteer
}
_TURN = re.compile(r"\n\n(Human|Assistant):")


def pair_rows(rows: Dataset, source: str, by: str, margin: float = 0.0) -> Iterator[dict[str, Any] | None]:
    """For each prompt the best answer against the worst, as a row with chosen and rejected; None where all are equal.

    `by`: the score that counts, or "score" for the set's overall one; `margin`: by which the two scores differ at
    least. Raises UserError for columns of no known set, or a row that differs from them.
    """
    columns = column_names(rows)
    shape = next((shape for shape in SHAPES if set(shape) <= set(columns)), None)
    if shape is None:
        known = "; ".join(", ".join(shape) for shape in SHAPES)
        raise UserError(f"{source}: has the columns {', '.join(columns)}; needed are those of a known set: {known}")
    score = SHAPES[shape] if by == "score" else by
    read = (json.loads(row[json_rows.COLUMN]) if json_rows.COLUMN in row else row for row in rows)
    if "response" in shape:  # neighbouring rows with one prompt
        prompts = (list(group) for _, group in groupby(read, key=lambda row: row.get("prompt")))
    else:
        prompts = ([row] for row in read)
    for group in prompts:
        try:
            yield _pair_answers(group, score, margin)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: a row has another form: {type(error).__name__}: {error}") from error


def _pair_answers(rows: list[dict[str, Any]], score: str, margin: float) -> dict[str, Any] | None:
    """`rows`: one with all answers to a prompt, or one for each answer."""
    row = rows[0]
    if "completions" in row:
        answers = [(answer.get(score), answer["response"]) for answer in row["completions"]]
    elif "answers" in row:
        sign = -1 if score == "rank" else 1  # rank 1 is the best
        answers = [(sign * answer[score], answer["answer"]) for answer in row["answers"]]
    else:
        answers = [(answer.get(score), answer["response"]) for answer in rows]
    scored = [(float(value), answer) for value, answer in answers if value is not None]
    if not scored:
        return None
    scored.sort(key=lambda item: item[0], reverse=True)
    high, chosen = scored[0]
    low, rejected = scored[-1]
    if high == low or high - low < margin:
        return None
    prompt = row["instruction"] if "instruction" in row else row["prompt"]
    messages = read_transcript(prompt)
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
    # A prompt ends with an empty turn of the assistant
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages
