"""Raw preference sets: files in the columns of the public sets become the pairs that a reader of the set expects."""

import json

import pytest

import train_dpo
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.raw_shapes import read_transcript


def turns(*texts):
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, texts, strict=False)]


def ultrafeedback(i, scores):
    answers = [{"model": f"m{n}", "response": f"a{n}", "overall_score": s, "fine-grained_score": 1.0, "critique": "c"}
               for n, s in enumerate(scores)]  # fmt: skip
    return {"source": "evol", "instruction": f"q{i}", "models": [], "completions": answers}


def helpsteer(prompt, response, helpfulness, correctness):
    scores = {"helpfulness": helpfulness, "correctness": correctness, "coherence": 4, "complexity": 1, "verbosity": 1}
    return {"prompt": prompt, "response": response, **scores}


def arena(winner):
    sides = {"conversation_a": turns("q", "a"), "conversation_b": turns("q", "b")}
    return {"question_id": "1", "model_a": "x", "model_b": "y", "winner": winner, "turn": 1, **sides}


NECTAR = {
    "prompt": "\n\nHuman: q\n\nAssistant: ",
    "answers": [{"answer": f"a{rank}", "model": "m", "rank": float(rank)} for rank in (3, 1, 2)],
    "turns": 1,
}
PREFERENCE = {"prompt": "q", "response_1": "a", "response_2": "b", "preference_statement": "s"}
HH = {"chosen": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: yes"}
# name: (rows, options, expected (source row, prompt, chosen, rejected), rows that hold no pair)
RAW = {
    "ultrafeedback": (
        [ultrafeedback(0, [5.0, 8.5, 2.0]), ultrafeedback(1, [3.0, 3.0])],
        ["--pair_by", "score"],
        [(1, "q0", "a1", "a2")],
        1,
    ),
    "all": (
        [ultrafeedback(0, [5.0, 8.5, 2.0, 4.5])],
        ["--pair_by", "score", "--score_pairs", "all", "--score_margin", "2.5"],
        [(1, "q0", *sides) for sides in (("a1", "a0"), ("a1", "a3"), ("a1", "a2"), ("a0", "a2"), ("a3", "a2"))],
        0,
    ),
    "nectar": ([NECTAR], ["--pair_by", "score"], [(1, "q", "a1", "a3")], 0),
    "helpsteer2": (
        [helpsteer("q", "a", 3, 4), helpsteer("q", "b", 4, 1), helpsteer("r", "c", 2, 2), helpsteer("r", "d", 2, 1)],
        ["--pair_by", "score"],
        [(1, "q", "b", "a")],
        1,
    ),
    "correctness": (
        [helpsteer("q", "a", 3, 4), helpsteer("q", "b", 4, 1), helpsteer("r", "c", 2, 2), helpsteer("r", "d", 2, 1)],
        ["--pair_by", "score", "--score_field", "correctness"],
        [(1, "q", "a", "b"), (3, "r", "c", "d")],
        0,
    ),
    "helpsteer preference": (
        [PREFERENCE | {"preference_strength": n} for n in (-2, 3, 0)],
        ["--pair_by", "score"],
        [(1, "q", "a", "b"), (2, "q", "b", "a")],
        1,
    ),
    "arena": (
        [arena(winner) for winner in ("model_b", "tie", "model_a", "tie (bothbad)")],
        [],
        [(1, "q", "b", "a"), (3, "q", "a", "b")],
        2,
    ),
    "hh": ([HH | {"rejected": HH["chosen"].replace("yes", "no")}], [], [(1, "r", "yes", "no")], 0),
    "binarized": (
        [{"prompt": "q", "chosen": turns("q", "a"), "rejected": turns("q", "b"), "score_chosen": 8.0}],
        [],
        [(1, "q", "a", "b")],
        0,
    ),
}  # fmt: skip


def fields(path, *more):
    return ["--model_name_or_path", "org/model", "--use_cpu", "--dataset_name", str(path), *more]


def text(side):
    return side if isinstance(side, str) else side[-1]["content"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", RAW)
def test_raw_sets_become_pairs(write_rows, name, suffix):
    rows, options, expected, without = RAW[name]
    pairs = load_pairs(parse_config(fields(write_rows(f"raw.{suffix}", rows), *options)))
    found = [(row["row"], *(text(row[side]) for side in ("prompt", "chosen", "rejected"))) for row in pairs.train]
    assert found == expected
    assert all(isinstance(row[side], list) for row in pairs.train for side in ("prompt", "chosen", "rejected"))
    assert pairs.rows == len(expected) + without and pairs.dropped == ({"no_preference": without} if without else {})


def test_transcripts():
    text = "\n\nHuman: Hi\n\nwell\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"
    assert read_transcript(text) == turns("Hi\n\nwell", "Hello", "Bye")
    assert read_transcript("Human: Hi") is None and read_transcript([]) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ultrafeedback(0, [1.0, 2.0]), "holds UltraFeedback's ratings, not pairs; say pair_by: score"),
        (NECTAR, "holds Nectar's rankings, not pairs; say pair_by: score"),
        (
            {"prompt": "q", "response_1": "a", "response_2": "b"},
            "no column chosen or rejected; it has prompt, response_1, response_2; the nearest shape is that of "
            "HelpSteer's preferences, with prompt, response_1, response_2, preference_strength; the first row is "
            '{"prompt": "q", "response_1": "a", "response_2": "b"}; docs/data.md',
        ),
        ({"text": "x" * 999}, f'the first row is {{"text": "{"x" * 290} ...; docs/data.md'),
    ],
)
def test_other_columns_are_an_error_that_shows_the_first_row(write_rows, row, message):
    path = write_rows("raw.jsonl", [row])
    with pytest.raises(UserError) as caught:
        load_pairs(parse_config(fields(path)))
    assert message in str(caught.value)


def test_an_unknown_score_is_an_error(write_rows):
    path = write_rows("raw.jsonl", [ultrafeedback(0, [1.0, 2.0])])
    with pytest.raises(UserError, match=r"score_field overal_score: .*did you mean overall_score"):
        load_pairs(parse_config(fields(path, "--pair_by", "score", "--score_field", "overal_score")))


@pytest.mark.grid
@pytest.mark.parametrize("name", RAW)
def test_each_raw_set_trains_two_steps(tiny_folder, write_rows, tmp_path, name):
    rows, options, *_ = RAW[name]
    argv = fields(write_rows("raw.jsonl", rows * 2), *options, "--output_dir", str(tmp_path / "run"))
    argv += ["--model_name_or_path", str(tiny_folder("llama")), "--global_batch_size", "1", "--max_steps", "2"]
    argv += ["--per_device_train_batch_size", "1", "--preflight", "skip", "--guard", "skip", "--logging_steps", "1"]
    assert train_dpo.main(argv) == 0
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 2]
