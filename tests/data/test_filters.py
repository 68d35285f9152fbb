"""Filters: what each leaves out against plain Python, counted by reason and listed by row."""

import json
import random
from collections import Counter

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.filters import load_keep
from sfm_dpo.data.preferences import load_pairs


@pytest.fixture
def load(write_rows):
    """A function: rows, fields -> the pairs of a run on them."""

    def run(rows, **fields):
        load_keep.cache_clear()
        words = ["--model_name_or_path", "m", "--dataset_name", write_rows("pairs.jsonl", rows), "--use_cpu"]
        words += [word for name, value in fields.items() for word in (f"--{name}", value)]
        return load_pairs(parse_config([str(word) for word in words]))

    return run


def test_exact_repeats_are_those_of_plain_python(load):
    rng = random.Random(0)
    rows = [
        {"prompt": rng.choice("abcdef") * 3, "chosen": f"yes {rng.randrange(4)}", "rejected": f"no {rng.randrange(3)}"}
        for _ in range(300)
    ]

    def left(**fields):
        pairs = load(rows, **fields)
        return [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in pairs.train], pairs.dropped

    unique = [row for i, row in enumerate(rows) if row not in rows[:i]]
    assert left(drop_duplicates="pairs") == (unique, Counter(duplicate=300 - len(unique)))
    firsts = [row for i, row in enumerate(rows) if all(row["prompt"] != other["prompt"] for other in rows[:i])]
    assert left(drop_duplicates="prompts") == (firsts, Counter(duplicate=300 - len(firsts)))


def test_rows_by_script(load, tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", "n": i} for i in range(9)]
    script = tmp_path / "keep.py"
    for limit in (3, 5):  # the cache follows the script's text
        script.write_text(f"def keep(row):\n    return row['n'] < {limit}\n")
        pairs = load(rows, filter_script=script)
        assert pairs.train["prompt"][:] == [f"p{i}" for i in range(limit)]
        assert pairs.dropped == Counter(script=9 - limit) and "filter_script does not keep it" in pairs.table()
    pairs.write_dropped(tmp_path / "dropped.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [(row, "script") for row in range(6, 10)]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "filter_script .*keep.py: FileNotFoundError"),
        ("x = 1", "KeyError: 'keep'; write a file with def keep"),
        ("def keep(row):\n    return row['m']", "KeyError: 'm', for the row"),
        ("def keep(row):\n    return False", "1 of 1 rows cannot be used"),
    ],
)
def test_a_script_that_does_not_work_is_an_error(load, tmp_path, script, message):
    if script:
        (tmp_path / "keep.py").write_text(script)
    with pytest.raises(UserError, match=message):
        load([{"prompt": "p", "chosen": "a", "rejected": "b"}], filter_script=tmp_path / "keep.py")
