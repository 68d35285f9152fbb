"""Raw preference sets as they are published: scored answers, rankings, a winner of two, plain transcripts.

`make_pairs` turns their rows into rows with prompt, chosen and rejected (see preferences.py). docs/data.md lists them.
"""

import json
import re
from collections.abc import Iterator
from itertools import combinations, groupby
from typing import Any

from datasets import Dataset, Features, Value
from datasets.fingerprint import Hasher

from sfm_dpo.common.errors import UserError
from sfm_dpo.config_checks import nearest
from sfm_dpo.data import json_rows
from sfm_dpo.data.sources import column_names, room_in_cache

VERSION = 1  # part of the cache's key: raise it with any change of this module that changes a pair

# Columns by which a shape is known, what it is, and its score: of each answer, of each row, or of the second response
SHAPES: dict[tuple[str, ...], tuple[str, str | None]] = {
    ("chosen", "rejected"): ("pairs", None),
    ("instruction", "completions"): ("UltraFeedback's ratings", "overall_score"),
    ("prompt", "answers"): ("Nectar's rankings", "rank"),
    ("prompt", "response_1", "response_2", "preference_strength"): ("HelpSteer's preferences", "preference_strength"),
    ("prompt", "response", "helpfulness"): ("HelpSteer's ratings", "helpfulness"),
    ("conversation_a", "conversation_b", "winner"): ("arena battles", None),
}
NO_PREFERENCE = {"no_preference": True}  # in place of a row without a pair
_TURN = re.compile(r"\n\n(Human|Assistant):")


@room_in_cache()
def make_pairs(rows: Dataset, source: str, args: Any) -> Dataset:
    """Rows with chosen and rejected as they are; of a raw set its pairs as JSON rows, with `source_row`.

    Args:
        args: a TrainConfig.

    Raises:
        UserError: columns of no known shape, or scores without pair_by.
    """
    columns = column_names(rows)
    shape = next((shape for shape in SHAPES if set(shape) <= set(columns)), None)
    if shape is None:
        first = json.dumps(next(_read(rows))[1], default=str, ensure_ascii=False)
        missing = [name for name in ("chosen", "rejected") if name not in columns]
        near = max(SHAPES, key=lambda known: len(set(known) & set(columns)) / len(known))
        raise UserError(
            f"dataset_name {source}: no column {' or '.join(missing)}; it has {', '.join(columns)}; the nearest shape "
            f"is that of {SHAPES[near][0]}, with {', '.join(near)}; the first row is {first[:300]}"
            f"{' ...' if len(first) > 300 else ''}; docs/data.md lists what can be read"
        )
    name, score = SHAPES[shape]
    if name == "pairs":
        return rows
    if score and args.pair_by is None:
        raise UserError(f"dataset_name {source}: holds {name}, not pairs; say pair_by: score (docs/data.md)")
    asked = args.score_field
    if score and asked and asked not in (known := _score_names(rows)):
        raise UserError(f"score_field {asked}: {source} has no such score{nearest(asked, known)}")
    options = {"shape": name, "score": asked or score, "margin": args.score_margin, "which": args.score_pairs}
    features = Features({json_rows.COLUMN: Value("string"), "source_row": Value("int64")})
    key = Hasher.hash((rows._fingerprint, options, VERSION))
    return Dataset.from_generator(_generate, features, gen_kwargs={"rows": rows, **options}, fingerprint=key)


def _read(rows: Dataset) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their numbers, from 1."""
    for number, row in enumerate(rows, 1):
        yield number, json.loads(row[json_rows.COLUMN]) if json_rows.COLUMN in row else row


def _score_names(rows: Dataset) -> set[str]:
    row = next(_read(rows))[1]
    return set(next(iter(row.get("completions") or row.get("answers") or ()), row))


def _generate(rows: Dataset, shape: str, score: str, margin: float, which: str) -> Iterator[dict[str, Any]]:
    rated = shape == "HelpSteer's ratings"
    for _, group in groupby(_read(rows), key=lambda item: item[1]["prompt"] if rated else item[0]):
        numbered = list(group)
        for pair in _pair_row([row for _, row in numbered], shape, score, margin, which) or [NO_PREFERENCE]:
            yield {json_rows.COLUMN: json.dumps(pair), "source_row": numbered[0][0]}


def _pair_row(group: list[dict], shape: str, score: str, margin: float, which: str) -> list[dict[str, Any]]:
    """The pairs of a row, or of neighbouring rows with one prompt; none where no answer is preferred."""
    row = group[0]
    if shape == "arena battles":
        sides = {"model_a": ("conversation_a", "conversation_b"), "model_b": ("conversation_b", "conversation_a")}
        names = sides.get(row["winner"])
        extra = {key: value for key, value in row.items() if not key.startswith("conversation_")}
        return [extra | {"chosen": row[names[0]], "rejected": row[names[1]]}] if names else []
    if shape == "UltraFeedback's ratings":
        prompt, answers = row["instruction"], [(a["response"], a.get(score)) for a in row["completions"]]
    elif shape == "Nectar's rankings":
        prompt, answers = row["prompt"], [(a["answer"], a.get(score)) for a in row["answers"]]
    elif shape == "HelpSteer's preferences":
        prompt, answers = row["prompt"], [(row["response_1"], 0), (row["response_2"], row[score])]
    else:
        prompt, answers = row["prompt"], [(r["response"], r.get(score)) for r in group]
    sign = -1 if score == "rank" else 1  # rank 1 is the best
    ranked = sorted(((sign * float(value), text) for text, value in answers if value is not None), key=lambda a: -a[0])
    couples = list(combinations(ranked, 2)) if which == "all" else [(ranked[0], ranked[-1])] if ranked else []
    consumed = ("completions", "answers", "response", "response_1", "response_2")
    extra = {key: value for key, value in row.items() if key not in consumed}
    extra["prompt"] = read_transcript(prompt) or [{"role": "user", "content": prompt}]
    return [
        extra | {"chosen": best[1], "rejected": worst[1]}
        for best, worst in couples
        if best[0] > worst[0] and best[0] - worst[0] >= margin
    ]


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
