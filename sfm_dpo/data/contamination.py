"""Contamination: pairs that share long n-grams of words with evaluation sets.

The usual convention (GPT-3, Tulu 3): 13 words in lower case and without punctuation; an n-gram that more than
COMMON_ROWS rows of a set share is a stock phrase and does not count. Paraphrases, translations, and rows of a set with
fewer words than n are not found.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets, load_dataset

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.preferences import PARTS, read_text
from sfm_dpo.data.sources import LOCAL_FORMATS

NGRAM = 13
COMMON_ROWS = 10
EXAMPLES = 5
# A word, or a single character of the scripts that put no space between words
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")


def read_evaluation_texts(name: str) -> list[str]:
    """All text of each row of an evaluation set: a local file or folder, or DATASET[/configuration] of the Hub.

    Of its splits the test split is read, where there is one, otherwise all.
    """
    path, config = name, None
    if name.count("/") == 2 and not Path(name).exists():
        path, _, config = name.rpartition("/")
    try:
        if file_format := LOCAL_FORMATS.get(Path(name).suffix):
            splits = load_dataset(file_format, data_files=name)
        else:
            splits = load_dataset(path, config)
    except Exception as error:  # of the Hub, of pyarrow, of the builder
        raise UserError(f"--against {name}: cannot be read: {error.__cause__ or error}") from error
    rows = splits["test"] if "test" in splits else concatenate_datasets(list(splits.values()))
    return ["\n".join(_list_texts(row)) for row in rows]


def _list_texts(value: Any) -> list[str]:
    """All text in nested lists and mappings."""
    if isinstance(value, str):
        return [value]
    items: Any = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    return [text for item in items for text in _list_texts(item)]


def list_ngrams(text: str, n: int) -> set[str]:
    """The n-grams of words of a text, in lower case and without punctuation."""
    words = _WORD.findall(text.lower())
    return {" ".join(words[i : i + n]) for i in range(len(words) - n + 1)}


def index_ngrams(texts: list[str], n: int) -> dict[str, int]:
    """The n-grams of an evaluation set that are no stock phrase, and the first row that has each."""
    first: dict[str, int] = {}
    rows: Counter[str] = Counter()
    for row, text in enumerate(texts):
        grams = list_ngrams(text, n)
        rows.update(grams)
        for gram in grams:
            first.setdefault(gram, row)
    return {gram: row for gram, row in first.items() if rows[gram] <= COMMON_ROWS}


def _match_pair(*sides: Any, index: dict[str, int], n: int) -> dict[str, Any]:
    """An n-gram that the pair and the evaluation set share, or "", and the row of the set that has it, or -1."""
    grams = set().union(*(list_ngrams(read_text(side), n) for side in sides))
    shared = min(grams & index.keys(), default="")
    return {"shared": shared, "set_row": index.get(shared, -1)}


def report_contamination(pairs: Dataset, names: list[str], n: int, num_proc: int | None = None) -> dict[str, Any]:
    """Counts and examples of each evaluation set, and the keys of all pairs that share an n-gram with any.

    Args:
        pairs: of preferences.py.
        names: of evaluation sets, as in `read_evaluation_texts`.
    """
    sets = []
    matched: set[int] = set()
    for name in names:
        texts = read_evaluation_texts(name)
        found = pairs.map(
            _match_pair,
            input_columns=list(PARTS),
            fn_kwargs={"index": index_ngrams(texts, n), "n": n},
            remove_columns=pairs.column_names,
            num_proc=num_proc,
            keep_in_memory=True,
            desc="Matching",
        )[:]
        examples = [
            {"row": row, "set_row": set_row, "text": shared}
            for row, (shared, set_row) in enumerate(zip(found["shared"], found["set_row"], strict=True))
            if shared
        ]
        matched.update(example["row"] for example in examples)
        sets.append(
            {
                "set": name,
                "rows": len(texts),
                "short": sum(not list_ngrams(text, n) for text in texts),
                "pairs": len(examples),
                "set_rows": len({example["set_row"] for example in examples}),
                "examples": examples[:EXAMPLES],
            }
        )
    keys = pairs["pair_key"]
    return {"ngram": n, "sets": sets, "pairs": [{"row": row, "key": keys[row]} for row in sorted(matched)]}
