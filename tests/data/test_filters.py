"""Filters: what each leaves out against plain Python, counted by reason and listed by row."""

import json
import random
from collections import Counter

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.filters import load_keep
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer


@pytest.fixture
def config_of(write_rows, tiny_folder):
    """A function: rows, fields -> configuration of a run on them."""

    def make(rows, **fields):
        argv = ["--dataset_name", write_rows("pairs.jsonl", rows), "--model_name_or_path", tiny_folder("llama")]
        argv += ["--use_cpu", *(word for name, value in fields.items() for word in (f"--{name}", value))]
        return parse_config([str(word) for word in argv])

    return make


def test_exact_repeats_and_the_limit_per_prompt_are_those_of_plain_python(config_of):
    rng = random.Random(0)
    rows = [
        {"prompt": rng.choice("abcdef") * 3, "chosen": f"yes {rng.randrange(4)}", "rejected": f"no {rng.randrange(3)}"}
        for _ in range(300)
    ]

    def left(**fields):
        pairs = load_pairs(config_of(rows, **fields))
        return [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in pairs.train], pairs.dropped

    unique = [row for i, row in enumerate(rows) if row not in rows[:i]]
    assert left(drop_duplicates="pairs") == (unique, Counter(duplicate=300 - len(unique)))
    firsts = [row for i, row in enumerate(rows) if all(row["prompt"] != other["prompt"] for other in rows[:i])]
    assert left(drop_duplicates="prompts") == (firsts, Counter(duplicate=300 - len(firsts)))
    limited = [row for i, row in enumerate(rows) if sum(r["prompt"] == row["prompt"] for r in rows[:i]) < 7]
    assert left(max_pairs_per_prompt=7) == (limited, Counter(prompt_limit=300 - len(limited)))


def test_rows_by_script(config_of, tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", "n": i} for i in range(9)]
    script = tmp_path / "keep.py"
    for limit in (3, 5):  # the cache follows the script's text
        script.write_text(f"def keep(row):\n    return row['n'] < {limit}\n")
        load_keep.cache_clear()
        pairs = load_pairs(config_of(rows, filter_script=script))
        assert pairs.train["prompt"][:] == [f"p{i}" for i in range(limit)]
        assert pairs.dropped == Counter(script=9 - limit) and "filter_script does not keep it" in pairs.table()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "filter_script .*keep.py: FileNotFoundError"),
        ("x = 1", "no function keep"),
        ("def keep(row):\n    return row['m']", "KeyError: 'm', for the row"),
        ("def keep(row):\n    return False", "none of its 1 rows can be used"),
    ],
)
def test_a_script_that_does_not_work_is_an_error(config_of, tmp_path, script, message):
    if script:
        (tmp_path / "keep.py").write_text(script)
    load_keep.cache_clear()
    with pytest.raises(UserError, match=message):
        load_pairs(config_of([{"prompt": "p", "chosen": "a", "rejected": "b"}], filter_script=tmp_path / "keep.py"))


def test_what_each_filter_drops_is_listed_with_row_and_reason(config_of, tmp_path):
    rows = [
        {"prompt": f"p{text} {i}", "chosen": "good " * 3, "rejected": text}
        for i, text in enumerate(["script", "an answer", "b" * 90, "c" * 200, "d"])
    ]
    rows += [rows[1], rows[1] | {"rejected": "second"}]
    script = tmp_path / "keep.py"
    script.write_text("def keep(row):\n    return row['rejected'] != 'script'\n")
    config = config_of(
        rows,
        filter_script=script,
        drop_duplicates="pairs",
        max_pairs_per_prompt=1,
        min_response_tokens=4,  # a token a byte, and the end
        max_response_tokens=150,
        max_length_ratio=5,
    )
    load_keep.cache_clear()
    pairs = load_token_pairs(config, load_tokenizer(config))
    pairs.write_dropped(tmp_path / "dropped.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    expected = {1: "script", 3: "length_ratio", 4: "response_long", 5: "response_short", 6: "duplicate"}
    expected |= {7: "prompt_limit"}
    assert {line["row"]: line["reason"] for line in lines} == expected and len(lines) == len(expected)
    assert pairs.dropped == Counter(expected.values()) and pairs.train["row"][:] == [2]
