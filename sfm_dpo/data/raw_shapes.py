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


def check_columns(rows: Dataset, source: str) -> None:
    """Raises UserError for rows that are no pairs."""
    columns = column_names(rows)
    missing = [name for name in ("chosen", "rejected") if name not in columns]
    if missing:
        raise UserError(
            f"dataset_name {source}: no column {' or '.join(missing)}; it has {', '.join(columns)}; of scored answers "
            f"make pairs with python scripts/make_pairs.py {source} --by score pairs.jsonl"
        )


def pair_rows(rows: Dataset, source: str, by: str, margin: float = 0.0) -> Iterator[dict[str, Any] | None]:
    """For each prompt the best answer against the worst, as a row with chosen and rejected; None where all are equal.

    Args:
        by: the score of the answers that counts; "score": the set's overall one.
        margin: by which the scores of the two differ at least.

    Raises:
        UserError: columns of no known set, or a row that differs from them.
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
    scored = [(float(value), answer) for value, answer in _read_answers(rows, score) if value is not None]
    if not scored:
        return None
    scored.sort(key=lambda item: item[0], reverse=True)
    high, chosen = scored[0]
    low, rejected = scored[-1]
    if high == low or high - low < margin:
        return None
    prompt = rows[0]["instruction"] if "instruction" in rows[0] else rows[0]["prompt"]
    messages = read_transcript(prompt)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"prompt": messages, "chosen": chosen, "rejected": rejected}


def _read_answers(rows: list[dict[str, Any]], score: str) -> list[tuple[Any, str]]:
    """Score and answer, of each answer to a prompt; the higher score is the better."""
    row = rows[0]
    if "completions" in row:
        return [(answer.get(score), answer["response"]) for answer in row["completions"]]
    if "answers" in row:
        sign = -1 if score == "rank" else 1  # rank 1 is the best
        return [(sign * answer[score], answer["answer"]) for answer in row["answers"]]
    return [(row.get(score), row["response"]) for row in rows]


def read_transcript(text: Any) -> Any:
    """Messages of text such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"; what is none is returned as it is.

    An assistant's turn that is empty and the last one, as at the end of a prompt, is left out.
    """
    if not isinstance(text, str) or not text.startswith("\n\nHuman:"):
        return text
    parts = _TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    messages = [{"role": roles[who], "content": content.strip()} for who, content in turns]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages
