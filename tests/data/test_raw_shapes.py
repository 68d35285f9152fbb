"""scripts/make_pairs.py: files in the columns of the public sets become the pairs that a reader of the set expects."""

import pytest

from scripts import make_pairs
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
HELPSTEER = [
    helpsteer("q", "a", 3, 4),
    helpsteer("q", "b", 4, 1),
    helpsteer("r", "c", 2, 2),
    helpsteer("r", "d", 2, 1),
]
# name: (rows, options, expected (prompt, chosen, rejected), prompts without a pair)
RAW = {
    "ultrafeedback": ([ultrafeedback(0, [5, 8.5, 2, None]), ultrafeedback(1, [3, 3])], "", [("q0", "a1", "a2")], 1),
    "all": (
        [ultrafeedback(0, [5.0, 8.5, 2.0, 4.5])],
        "--score_pairs all --score_margin 2.5",
        [("q0", *sides) for sides in (("a1", "a0"), ("a1", "a3"), ("a1", "a2"), ("a0", "a2"), ("a3", "a2"))],
        0,
    ),
    "nectar": ([NECTAR], "", [("q", "a1", "a3")], 0),
    "helpsteer2": (HELPSTEER, "", [("q", "b", "a")], 1),
    "correctness": (HELPSTEER, "--by correctness", [("q", "a", "b"), ("r", "c", "d")], 0),
    "helpsteer preference": (
        [PREFERENCE | {"preference_strength": n} for n in (-2, 3, 0)],
        "",
        [("q", "a", "b"), ("q", "b", "a")],
        1,
    ),
    "arena": (
        [arena(winner) for winner in ("model_b", "tie", "model_a", "tie (bothbad)")],
        "",
        [("q", "b", "a"), ("q", "a", "b")],
        2,
    ),
}


def load(path):
    return load_pairs(parse_config(["--model_name_or_path", "org/model", "--use_cpu", "--dataset_name", str(path)]))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", RAW)
def test_raw_sets_become_pairs(write_rows, tmp_path, capsys, name, suffix):
    rows, options, expected, without = RAW[name]
    raw, out = write_rows(f"raw.{suffix}", rows), tmp_path / "pairs.jsonl"
    assert make_pairs.main([str(raw), "--by", "score", *options.split(), str(out)]) == 0
    assert f"pairs.jsonl: {len(expected)} pairs; {without} prompts" in capsys.readouterr().out
    pairs = load(out)
    assert [tuple(row[side][-1]["content"] for side in ("prompt", "chosen", "rejected")) for row in pairs.train] == (
        expected
    )
    with pytest.raises(UserError, match=f"not pairs; .* python scripts/make_pairs.py {raw} --by score"):
        load(raw)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "x"}, "", "has the columns text; needed are those of a known set: instruction, completions (Ultra"),
        (arena("tie"), "", "no prompt of RAW has answers that differ in it"),
        (ultrafeedback(0, [1, 2]), "--by overal_score", "--by overal_score: no prompt of RAW has answers that differ"),
        (ultrafeedback(0, ["high"]), "", "a row is not one of UltraFeedback's ratings: ValueError: could not convert"),
        (ultrafeedback(0, [1, 2]), "--score_margin -1", "--score_margin: '-1' must be from 0 to inf"),
        (ultrafeedback(0, [1, 2]), "--dataset_train_split dev", "dev"),
    ],
)
def test_what_cannot_be_paired_is_one_line(write_rows, tmp_path, capsys, caplog, row, options, message):
    raw, out = write_rows("raw.jsonl", [row]), tmp_path / "pairs.jsonl"
    try:
        code = make_pairs.main([str(raw), "--by", "score", *options.split(), str(out)])
    except SystemExit as end:
        code = end.code
    lines = [*caplog.messages, *capsys.readouterr().err.splitlines()]
    assert code == 2 and any(message.replace("RAW", str(raw)) in line for line in lines), lines
    assert not list(tmp_path.glob("*pairs.jsonl*"))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {f: "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: " + f for f in ("chosen", "rejected")},
            ("r", "chosen", "rejected"),
        ),
        (
            {"prompt": "q", "chosen": turns("q", "a"), "rejected": turns("q", "b"), "score_chosen": 8.0},
            ("q", "a", "b"),
        ),
    ],
)
def test_published_pairs_are_read_as_they_are(write_rows, row, expected):
    [pair] = load(write_rows("pairs.jsonl", [row])).train
    assert tuple(pair[side][-1]["content"] for side in ("prompt", "chosen", "rejected")) == expected


def test_transcripts():
    text = "\n\nHuman: Hi\n\nwell\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"
    assert read_transcript(text) == turns("Hi\n\nwell", "Hello", "Bye")
    assert read_transcript("Human: Hi") is None and read_transcript([]) is None
