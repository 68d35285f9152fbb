"""scripts/make_pairs.py: files in the columns of the public sets become the pairs that a reader of the set expects."""

import pytest

from scripts import make_pairs
from sfm_dpo.common.errors import UserError
from sfm_dpo.data.scored_formats import read_transcript
from tests.toolbox import assistant, read_pairs, user


def ultrafeedback(i, scores):
    answers = [{"model": f"m{n}", "response": f"a{n}", "overall_score": s} for n, s in enumerate(scores)]
    return {"source": "evol", "instruction": f"q{i}", "models": [], "completions": answers}


NECTAR = {
    "prompt": "\n\nHuman: q\n\nAssistant: ",
    "answers": [{"answer": f"a{rank}", "model": "m", "rank": float(rank)} for rank in (3, 1, 2)],
    "turns": 1,
}
ULTRAFEEDBACK = [ultrafeedback(0, [5, 8.5, 2, None]), ultrafeedback(1, [3, 3]), ultrafeedback(2, [1, 2])]
ODD = [ultrafeedback(0, [float("nan"), 1, 5]), ultrafeedback(1, [1, 3, 4]), ultrafeedback(2, [1, 2])]
ODD[1]["completions"][2]["response"] = None
ODD[2]["completions"][1]["response"] = "a0"
HELPSTEER = [
    {"prompt": "q", "response": "a", "helpfulness": 3, "correctness": 4},
    {"prompt": "q", "response": "b", "helpfulness": 4, "correctness": 1},
    {"prompt": "r", "response": "c", "helpfulness": 2, "correctness": 2},
    {"prompt": "r", "response": "d", "helpfulness": 2, "correctness": 1},
]
GENERIC = [{"prompt": "q", "responses": ["a", "b", "c"], "scores": [2, 3.5, 1]}]
BY_ROW = [{"prompt": "q", "response": text, "score": score} for text, score in (("a", 2), ("b", 3), ("c", 1))]
# name: (rows, options, expected (prompt, chosen, rejected), prompts without a pair)
RAW = {
    "responses and scores": (GENERIC, "", [("q", "b", "c")], 0),
    "a row for each answer": (BY_ROW, "", [("q", "b", "c")], 0),
    "messages": ([GENERIC[0] | {"prompt": [user("q")]}], "", [("q", "b", "c")], 0),
    "ultrafeedback": (ULTRAFEEDBACK, "", [("q0", "a1", "a2"), ("q2", "a1", "a0")], 1),
    "margin": (ULTRAFEEDBACK, "--score_margin 2.5", [("q0", "a1", "a2")], 2),
    "no score, no answer": (ODD, "", [("q0", "a2", "a1"), ("q1", "a1", "a0")], 1),
    "nectar": ([NECTAR], "", [("q", "a1", "a3")], 0),
    "helpsteer2": (HELPSTEER, "", [("q", "b", "a")], 1),
    "correctness": (HELPSTEER, "--by correctness", [("q", "a", "b"), ("r", "c", "d")], 0),
}


def last_texts(pairs):
    return [tuple(row[side][-1]["content"] for side in ("prompt", "chosen", "rejected")) for row in pairs]


@pytest.mark.parametrize(("name", "suffix"), [*((name, "jsonl") for name in RAW), ("ultrafeedback", "parquet")])
def test_raw_sets_become_pairs(write_rows, tmp_path, capsys, name, suffix):
    rows, options, expected, without = RAW[name]
    raw = write_rows(f"raw.{suffix}", rows)
    out = tmp_path / "pairs.jsonl"
    assert make_pairs.main([str(raw), "--by", "score", *options.split(), str(out)]) == 0
    assert f"pairs.jsonl: {len(expected)} pairs; {without} prompts" in capsys.readouterr().out
    assert make_pairs.main([str(raw), "--by", "score", str(raw)]) == 2 and raw.stat().st_size, "not overwritten"
    assert last_texts(read_pairs(out).train) == expected
    with pytest.raises(UserError, match=f"no column chosen .* python scripts/make_pairs.py {raw} --by score"):
        read_pairs(raw)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "x"}, "", "unknown dataset format with columns text; supported are: prompt, responses, scores;"),
        (ultrafeedback(0, [1, 2]), "--by overal_score", "--by overal_score: no prompt of RAW has answers that differ"),
        (GENERIC[0] | {"scores": [1]}, "", "a row is malformed: ValueError: zip() argument 2 is shorter"),
        (ultrafeedback(0, ["high"]), "", "a row is malformed: ValueError: could not convert"),
    ],
)
def test_what_cannot_be_paired_is_one_line(write_rows, tmp_path, caplog, row, options, message):
    raw = write_rows("raw.jsonl", [row])
    assert make_pairs.main([str(raw), "--by", "score", *options.split(), str(tmp_path / "pairs.jsonl")]) == 2
    assert any(message.replace("RAW", str(raw)) in line for line in caplog.messages), caplog.messages
    assert not list(tmp_path.glob("*pairs.jsonl*"))


def test_transcripts(write_rows):
    text = "\n\nHuman: Hi\n\nwell\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"
    assert read_transcript(text) == [user("Hi\n\nwell"), assistant("Hello"), user("Bye")]
    assert read_transcript("Human: Hi") == "Human: Hi" and read_transcript([]) == []
    pairs = read_pairs(write_rows("pairs.jsonl", [{"chosen": text + " good", "rejected": text + " bad"}])).train
    assert last_texts(pairs) == [("Bye", "good", "bad")]
