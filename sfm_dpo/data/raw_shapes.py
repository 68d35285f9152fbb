"""Raw preference sets as they are published: scored answers, rankings, or the winner of two conversations.

`pair_rows` makes pairs of their rows for scripts/make_pairs.py. docs/data.md lists the sets.
"""

import json
import re
from collections.abc import Iterator
from itertools import combinations, groupby
from typing import Any

from datasets import Dataset

from sfm_dpo.common.errors import UserError
from sfm_dpo.data import json_rows
from sfm_dpo.data.sources import column_names

# Columns by which a set is known, what it is, and the score that --by score takes
SHAPES = {
    ("instruction", "completions"): ("UltraFeedback's ratings", "overall_score"),
    ("prompt", "answers"): ("Nectar's rankings", "rank"),
    ("prompt", "response_1", "response_2", "preference_strength"): ("HelpSteer's preferences", "preference_strength"),
    ("prompt", "response", "helpfulness"): ("HelpSteer's ratings", "helpfulness"),
    ("conversation_a", "conversation_b", "winner"): ("arena battles", "winner"),
}
ANSWER_COLUMNS = "completions answers response response_1 response_2 conversation_a conversation_b".split()
_TURN = re.compile(r"\n\n(Human|Assistant):")


def check_columns(rows: Dataset, source: str) -> None:
    """Raises UserError for rows that are no pairs, with the command that makes pairs of them where there is one."""
    columns = column_names(rows)
    missing = [name for name in ("chosen", "rejected") if name not in columns]
    if not missing:
        return
    for shape, (name, _) in SHAPES.items():
        if set(shape) <= set(columns):
            raise UserError(
                f"dataset_name {source}: holds {name}, not pairs; make pairs of them with python "
                f"scripts/make_pairs.py {source} --by score pairs.jsonl"
            )
    raise UserError(f"dataset_name {source}: no column {' or '.join(missing)}; it has {', '.join(columns)}")


def pair_rows(
    rows: Dataset, source: str, by: str, margin: float = 0.0, every: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """For each prompt its pairs, as rows with chosen and rejected; none where no answer is preferred.

    Args:
        by: the score of the answers that counts; "score": the set's overall one.
        margin: by which the scores of a pair differ at least.
        every: all pairs of answers whose scores differ, not only the best and the worst answer.

    Raises:
        UserError: columns of no known set, or a row that differs from them.
    """
    columns = column_names(rows)
    shape = next((shape for shape in SHAPES if set(shape) <= set(columns)), None)
    if shape is None:
        known = "; ".join(f"{', '.join(shape)} ({name})" for shape, (name, _) in SHAPES.items())
        raise UserError(f"{source}: has the columns {', '.join(columns)}; needed are those of a known set: {known}")
    name, overall = SHAPES[shape]
    score = overall if by == "score" else by
    read = (json.loads(row[json_rows.COLUMN]) if json_rows.COLUMN in row else row for row in rows)
    if "response" in shape:  # neighbouring rows with one prompt
        prompts = (list(group) for _, group in groupby(read, key=lambda row: row.get("prompt")))
    else:
        prompts = ([row] for row in read)
    for group in prompts:
        try:
            yield _pair_answers(group, score, margin, every)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: a row is not one of {name}: {type(error).__name__}: {error}") from error


def _pair_answers(rows: list[dict[str, Any]], score: str, margin: float, every: bool) -> list[dict[str, Any]]:
    scored = [(float(value), answer) for value, answer in _read_answers(rows, score) if value is not None]
    scored.sort(key=lambda item: item[0], reverse=True)
    couples = list(combinations(scored, 2))
    if not every:
        couples = [(scored[0], scored[-1])] if scored else []
    shared = {key: value for key, value in rows[0].items() if key not in ANSWER_COLUMNS}
    prompt = shared.get("instruction", shared.get("prompt"))
    if prompt is not None:
        shared["prompt"] = read_transcript(prompt) or [{"role": "user", "content": prompt}]
    return [
        shared | {"chosen": chosen, "rejected": rejected}
        for (high, chosen), (low, rejected) in couples
        if high > low and high - low >= margin
    ]


def _read_answers(rows: list[dict[str, Any]], score: str) -> list[tuple[Any, Any]]:
    """Score and answer, of each answer to a prompt; the higher score is the better."""
    row = rows[0]
    if "completions" in row:
        return [(answer.get(score), answer["response"]) for answer in row["completions"]]
    if "answers" in row:
        sign = -1 if score == "rank" else 1  # rank 1 is the best
        return [(sign * answer[score], answer["answer"]) for answer in row["answers"]]
    if "conversation_a" in row:
        return [(row["winner"] == f"model_{side}", row[f"conversation_{side}"]) for side in "ab"]
    if "response_1" in row:
        return [(0, row["response_1"]), (row.get(score), row["response_2"])]
    return [(row.get(score), row["response"]) for row in rows]


def read_transcript(text: Any) -> list[dict[str, str]] | None:
    """Messages of text such as "\\n\\nHuman: Hi\\n\\nAssistant: Hello"; None where it does not begin so.

    An assistant's turn that is empty and the last one, as at the end of a prompt, is left out.
    """
    if not isinstance(text, str) or not text.startswith("\n\nHuman:"):
        return None
    parts = _TURN.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    messages = [{"role": roles[who], "content": content.strip()} for who, content in turns]
    return messages[:-1] if messages[-1] == {"role": "assistant", "content": ""} else messages
