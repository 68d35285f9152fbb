"""Filters against plain Python, counted by reason and listed by row; checks of the answers."""

import itertools
import json
import random
from dataclasses import replace

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.data.preferences import load_keep
from tests.toolbox import assistant, read_pairs, user

PROSE = "The parser reads one line after the other and keeps what it has read in a list of tokens. " * 3
FAULTY = [
    PROSE + "And then it goes on to the next of the files that were",
    PROSE + "\n```python\nprint(1)\n",
    "Yes.<|im_end|>\n<|im_start|>user\nAnd now?",
    "Yes.\n\nHuman: and now?",
    " Assistant: yes.",
    "<think>\n\n</think>\nYes.",
    "<think>Let me see. It is",
]
SOUND = [
    PROSE + "Yes.",
    PROSE + "\n\n- tokens\n- lines",
    PROSE + "See https://example.org/a-page-about-parsers",
    "x = 3",
    "A human: that is what he is. The assistant: his name.",
    "<think>Let me see.</think>\nYes.",
    "</think>\nNo.",
]


@pytest.fixture
def load(write_rows):
    def run(rows, *options, file="pairs.jsonl"):
        load_keep.cache_clear()
        return read_pairs(write_rows(file, rows), *options)

    return run


def test_exact_repeats_are_those_of_plain_python(load):
    rng = random.Random(0)
    rows = [
        {"prompt": rng.choice("abcdef") * 3, "chosen": f"yes {rng.randrange(4)}", "rejected": f"no {rng.randrange(3)}"}
        for _ in range(300)
    ]

    unique = [row for i, row in enumerate(rows) if row not in rows[:i]]
    firsts = [row for i, row in enumerate(rows) if all(row["prompt"] != other["prompt"] for other in rows[:i])]
    for repeats, expected in (("pairs", unique), ("prompts", firsts)):
        pairs = load(rows, "--drop_duplicates", repeats)
        assert [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in pairs.train] == expected
        assert pairs.dropped == {"duplicate": 300 - len(expected)}


def test_rows_by_script(load, tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", "n": i} for i in range(9)]
    script = tmp_path / "keep.py"
    known = tmp_path / "limit.txt"
    reads = f"int(open('{known}').read())"
    for text, limit in (("3", 3), ("5", 5), (reads, 4), (reads, 5)):  # the cache follows it, and what it has read
        known.write_text(str(limit))
        script.write_text(f"limit = {text}\ndef keep(row):\n    return row['n'] < limit\n")
        pairs = load(rows, "--filter_script", script)
        assert pairs.train["prompt"][:] == [f"p{i}" for i in range(limit)]
        assert pairs.dropped == {"script": 9 - limit} and "rejected by filter_script" in pairs.explain("script")
    several = replace(pairs, dropped_rows=[pairs.dropped_rows[i] for i in (2, 0, 1)])  # as splits are drawn
    assert f"first in row {pairs.dropped_rows[0]['row']} of" in several.explain("script")
    pairs.write_dropped(tmp_path / "dropped.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [(row, "script") for row in range(6, 10)]


def test_the_scripts_to_copy(load, monkeypatch):
    scripts = PROJECT / "data/filters"
    sides = [
        ("See https://a.org/x.", "No."),
        ("Yes.", "I can't help."),
        ("Yes.", "No."),
        ("Look: https://b.org.", "I’m here."),
        ("Yes.", "I’m sorry."),
    ]
    texts = [{"prompt": "At https://b.org?", "chosen": chosen, "rejected": rejected} for chosen, rejected in sides]
    talks = [{side: [user(row["prompt"]), assistant(row[side])] for side in ("chosen", "rejected")} for row in texts]
    parts = json.loads(json.dumps(talks))
    for message in itertools.chain.from_iterable(row[side] for row in parts for side in ("chosen", "rejected")):
        message["content"] = [{"type": "text", "text": message["content"]}]
    for rows in (texts, talks, parts):
        unusable = [{"chosen": None, "rejected": None}, {"chosen": [{"role": "user"}], "rejected": []}]
        pairs = load([*rows, *unusable], "--filter_script", scripts / "links.py", "--max_dropped_fraction=1")
        assert pairs.train["row"][:] == [3, 4]
    question = " ".join(f"w{i}" for i in range(14))
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: {"question": [question.upper() + "?"]})
    prompts = ["Yes?<|im_end|>", f"Now: {question.replace(' ', chr(10))}.", question.partition(" ")[2], question[4:-4]]
    rows = [{"prompt": prompt, "chosen": "Yes.", "rejected": "No."} for prompt in prompts]
    assert load(rows, "--filter_script", scripts / "contamination.py").train["row"][:] == [4]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "filter_script .*keep.py: FileNotFoundError"),
        ("x = 1", "KeyError: 'keep'; write a file with def keep"),
        (
            "rows = iter(lambda: 1, 2)\nx = (i for i in rows)\ndef keep(row):\n    return x",
            "cannot be cached: .*create",
        ),
        ("def keep(row):\n    return row['m']", "KeyError: 'm'; correct keep.row. for the row"),
        ("def keep(row):\n    return False", "no train pair is left of 1 rows"),
    ],
)
def test_a_script_that_does_not_work_is_an_error(load, tmp_path, script, message):
    if script:
        (tmp_path / "keep.py").write_text(script)
    with pytest.raises(UserError, match=message):
        load([{"prompt": "p", "chosen": "a", "rejected": "b"}], "--filter_script", tmp_path / "keep.py")


@pytest.mark.parametrize(("is_kept", "answers"), [(False, FAULTY), (True, SOUND)])
def test_the_script_against_faults(load, is_kept, answers):
    rows = [{"prompt": "q", "chosen": "Fine.", "rejected": answer} for answer in answers]
    rows += [{side: [user("q"), assistant(row[side])] for side in ("chosen", "rejected")} for row in rows]
    rows.append({"prompt": "q", "chosen": "Yes.", "rejected": "No."})
    pairs = load(rows, "--filter_script", PROJECT / "data/filters/faults.py")
    assert len(pairs.train) == (len(rows) if is_kept else 1)
