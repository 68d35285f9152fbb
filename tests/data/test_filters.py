"""Filters against plain Python, counted by reason and listed by row; checks of the answers; contamination."""

import itertools
import json
import random
import re

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.data import filters
from sfm_dpo.data.answers import CHECKS, find_faults, read_answers
from sfm_dpo.data.filters import load_keep
from tests.toolbox import assistant, read_pairs, user

PROSE = "The parser reads one line after the other and keeps what it has read in a list of tokens. " * 3
FAULTY = [  # (check, answer)
    ("cut", PROSE + "And then it goes on to the next of the files that were"),
    ("cut", PROSE + "\n```python\nprint(1)\n"),
    ("role_tag", "Yes.<|im_end|>\n<|im_start|>user\nAnd now?"),
    ("role_tag", "Yes.\n\nHuman: and now?"),
    ("role_tag", " Assistant: yes."),
    ("bad_think", "<think>\n\n</think>\nYes."),
    ("bad_think", "<think>Let me see. It is"),
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
    for limit in (3, 5):  # the cache follows the script's text
        script.write_text(f"def keep(row):\n    return row['n'] < {limit}\n")
        pairs = load(rows, "--filter_script", script)
        assert pairs.train["prompt"][:] == [f"p{i}" for i in range(limit)]
        assert pairs.dropped == {"script": 9 - limit} and "rejected by filter_script" in pairs.explain("script")
    pairs.write_dropped(tmp_path / "dropped.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [(row, "script") for row in range(6, 10)]


def test_the_script_of_the_docs(load, tmp_path):
    *_, code = re.findall(r"```python\n(.*?)```", (PROJECT / "docs/data.md").read_text(), re.DOTALL)
    (tmp_path / "keep.py").write_text(code)
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
        pairs = load([*rows, *unusable], "--filter_script", tmp_path / "keep.py", "--max_dropped_fraction=1")
        assert pairs.train["row"][:] == [3, 4]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "filter_script .*keep.py: FileNotFoundError"),
        ("x = 1", "KeyError: 'keep'; write a file with def keep"),
        ("def keep(row):\n    return row['m']", "KeyError: 'm'; correct keep.row. for the row"),
        ("def keep(row):\n    return False", "no train pair is left of 1 rows"),
    ],
)
def test_a_script_that_does_not_work_is_an_error(load, tmp_path, script, message):
    if script:
        (tmp_path / "keep.py").write_text(script)
    with pytest.raises(UserError, match=message):
        load([{"prompt": "p", "chosen": "a", "rejected": "b"}], "--filter_script", tmp_path / "keep.py")


@pytest.mark.parametrize(("kind", "answer"), [*FAULTY, *((None, answer) for answer in SOUND)])
def test_each_fault_is_found_and_nothing_else(kind, answer):
    assert [name for name, (find, _) in CHECKS.items() if find(answer)] == ([kind] if kind else [])


def test_faults_are_counted_by_side_with_the_first_pair(load):
    rows = [{"prompt": "q", "chosen": answer, "rejected": "No."} for _, answer in FAULTY]
    rows += [{"prompt": "q", "chosen": "Yes.", "rejected": FAULTY[0][1]}]
    pairs = load(rows).train
    summary = {row["fault"]: row for row in find_faults(pairs, read_answers(pairs, num_proc=2))}
    assert set(summary) == {*CHECKS} - {"two_turns"}
    assert [summary["cut"][key] for key in ("pairs", "chosen", "rejected")] == [3, 2, 1]
    assert summary["role_tag"]["row"] == 3 and summary["role_tag"]["source"].endswith(".jsonl")


def test_two_assistant_turns_in_a_row_are_found_where_they_are_trained(load):
    def talk(*roles):
        return [{"role": role, "content": "x"} for role in roles]

    sides = {"chosen": talk("tool", "assistant"), "rejected": talk("assistant", "assistant")}
    rows = [sides | {"prompt": talk("user")}, sides | {"prompt": talk("assistant", "assistant", "user")}]
    rows[1]["rejected"] = talk("assistant", "tool", "assistant")
    rows.append(sides | {"prompt": talk("user", "assistant")})  # where the prompt ends, too
    pairs = load(rows).train
    [found] = find_faults(pairs, read_answers(pairs))
    assert [found[key] for key in ("fault", "chosen", "rejected", "row")] == ["two_turns", 0, 2, 1]


def test_prompts_in_common_with_evaluation_sets_are_those_of_plain_python(load, write_rows, tmp_path, monkeypatch):
    rng = random.Random(0)
    words = [f"w{i}" for i in range(300)]
    questions = [[rng.choice(words) for _ in range(rng.choice([8, 13, 40]))] for _ in range(60)]
    rows = []
    for i in range(120):
        texts = {name: [rng.choice(words) for _ in range(30)] for name in ("prompt", "chosen", "rejected")}
        if i % 2:
            start = rng.randrange(20)
            side = rng.choice(["prompt", "prompt", "chosen"])
            texts[side][5:5] = rng.choice(questions)[start : start + rng.choice([11, 13, 14])]
        rows.append({name: " ".join(text).upper() + "." for name, text in texts.items()})
    # Each row's second text is too common to be a match
    stored = [{"question": ", ".join(q), "choices": [rows[0]["prompt"], {"n": "007"}]} for q in questions]

    def grams(text):
        text = text.lower().replace(",", "").replace(".", "").split()
        return {tuple(text[i : i + 13]) for i in range(len(text) - 12)}

    known = set().union(*(grams(" ".join(q)) for q in questions))
    expected = [i for i, row in enumerate(rows) if grams(row["prompt"]) & known]
    assert 10 < len(expected) < 50
    plain = [{"question": row["question"]} for row in stored]
    write_rows("set/test.parquet", plain)
    write_rows("set/train.parquet", [{"question": rows[0]["prompt"]}])
    for sets in ([write_rows("set.jsonl", stored)], [tmp_path / "set"]):
        left = load(rows, "--drop_contaminated", *sets)
        assert left.train["prompt"][:] == [row["prompt"] for i, row in enumerate(rows) if i not in expected]
        assert left.dropped == {"contaminated": len(expected)}
    halves = [write_rows("first.jsonl", stored[:30]), write_rows("second.jsonl", stored[30:])]
    options = [write_rows("pairs.jsonl", rows), "--drop_contaminated", *halves]
    assert read_pairs(*options).dropped == {"contaminated": len(expected)}
    with monkeypatch.context() as patch:
        patch.setattr(filters, "_list_ngrams", None)  # what is compared again fails
        assert read_pairs(*options).dropped == {"contaminated": len(expected)}
        patch.setattr(filters, "CONTAMINATED_VERSION", 0)
        with pytest.raises(TypeError):
            read_pairs(*options)


def test_names_of_evaluation_sets(load, write_rows, tmp_path, monkeypatch):
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}]
    for name in ("none.jsonl", "/nowhere/none.jsonl", "~/nowhere/none", "./no/where"):
        with pytest.raises(UserError, match=rf"drop_contaminated: dataset_name {name}: no such file or folder; check"):
            load(rows, "--drop_contaminated", name)
    with pytest.raises(UserError, match="dataset_name org/set: not a local file"):
        load(rows, "--drop_contaminated", "org/set/main")
    write_rows("evals/set.jsonl", [{"question": "q"}])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load(rows, "--drop_contaminated", "~/evals/set.jsonl").train) == 1
    with pytest.raises(UserError, match=r"no train pair is left of 1 rows .*chosen equals rejected"):
        load([rows[0] | {"rejected": "a"}], "--drop_contaminated", "~/evals/set.jsonl")
