"""What is wrong with pairs: each check on answers that have the fault and on some that only look like it."""

import json
import random

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.contamination import report_contamination
from sfm_dpo.data.faults import CHECKS, find_faults
from sfm_dpo.data.preferences import load_pairs

PROSE = "The parser reads one line after the other and keeps what it has read in a list of tokens. " * 3
FAULTY = [  # (check, answer)
    ("refusal", "I'm sorry, but I can't help with that."),
    ("refusal", "As an AI language model, I do not have opinions."),
    ("refusal", "I’m not able to discuss this."),
    ("cut", PROSE + "And then it goes on to the next of the files that were"),
    ("cut", PROSE + "\n```python\nprint(1)\n"),
    ("role_tag", "Yes.<|im_end|>\n<|im_start|>user\nAnd now?"),
    ("role_tag", "Yes.\n\nHuman: and now?"),
    ("bad_think", "<think>\n\n</think>\nYes."),
    ("bad_think", "<think>Let me see. It is"),
]
SOUND = [
    PROSE + "Yes.",
    "I'm sorry to hear that your cat cannot walk. You can help it so.",
    PROSE + "I can't help admiring it.",
    PROSE + "\n\n- tokens\n- lines",
    PROSE + "See https://example.org/a-page-about-parsers",
    "x = 3",
    "This is an AI that I can recommend.",
    "A doctor must decline it; a cat cannot help it.",
    "A human: that is what he is. The assistant: his name.",
    "<think>Let me see.</think>\nYes.",
    "</think>\nNo.",
]


@pytest.fixture
def load(write_rows):
    def run(rows, *options, file="pairs.jsonl"):
        argv = ["--dataset_name", write_rows(file, rows), "--model_name_or_path", "m", "--use_cpu", *options]
        return load_pairs(parse_config([str(word) for word in argv]))

    return run


@pytest.mark.parametrize(("kind", "answer"), [*FAULTY, *((None, answer) for answer in SOUND)])
def test_each_fault_is_found_and_nothing_else(kind, answer):
    assert [name for name, (find, _) in CHECKS.items() if find(answer) is not None] == ([kind] if kind else [])


def test_faults_are_counted_by_side_with_examples(load):
    rows = [{"prompt": "q", "chosen": answer, "rejected": "No."} for _, answer in FAULTY]
    rows += [{"prompt": "q", "chosen": "Yes.", "rejected": FAULTY[0][1]}]
    pairs = load(rows).train
    summary = {row["fault"]: row for row in find_faults(pairs, num_proc=2)}
    assert set(summary) == set(CHECKS)
    assert [summary["refusal"][key] for key in ("pairs", "chosen", "rejected")] == [4, 3, 1]
    assert "<|im_start|>user" in summary["role_tag"]["examples"][0]["text"]


def test_pairs_in_common_with_evaluation_sets_are_those_of_plain_python(load, write_rows, tmp_path):
    rng = random.Random(0)
    words = [f"w{i}" for i in range(300)]
    questions = [[rng.choice(words) for _ in range(rng.choice([8, 13, 40]))] for _ in range(60)]
    rows = []
    for i in range(120):
        texts = {name: [rng.choice(words) for _ in range(30)] for name in ("prompt", "chosen", "rejected")}
        if i % 2:
            start = rng.randrange(20)
            side = rng.choice(list(texts))
            texts[side][5:5] = rng.choice(questions)[start : start + rng.choice([11, 13, 14])]
        rows.append({name: " ".join(text).upper() + "." for name, text in texts.items()})
    # Each row's second text is too common to be a match
    stored = [{"question": ", ".join(q), "choices": [rows[0]["prompt"]]} for q in questions]

    def grams(text):
        text = text.lower().replace(",", "").replace(".", "").split()
        return {tuple(text[i : i + 13]) for i in range(len(text) - 12)}

    known = set().union(*(grams(" ".join(q)) for q in questions))
    expected = [i for i, row in enumerate(rows) if any(grams(text) & known for text in row.values())]
    assert 10 < len(expected) < 50
    pairs = load(rows).train
    write_rows("set/test.parquet", stored)
    write_rows("set/train.parquet", stored[:1])
    for name in (write_rows("set.jsonl", stored), tmp_path / "set"):
        result = report_contamination(pairs, [str(name)], 13)
        [found] = result["sets"]
        assert [row["row"] for row in result["pairs"]] == expected and found["pairs"] == len(expected)
        assert found["rows"] == 60
        for example in found["examples"]:
            assert {tuple(example["text"].split())} <= grams(" ".join(questions[example["set_row"]]))
    with pytest.raises(UserError, match=r"--against none\.jsonl: cannot be read"):
        report_contamination(pairs, ["none.jsonl"], 13)

    listed = tmp_path / "found.json"
    listed.write_text(json.dumps({"sampled": False, "contamination": result}))
    left = load(rows, "--drop_contaminated", listed)
    assert left.train["prompt"][:] == [row["prompt"] for i, row in enumerate(rows) if i not in expected]
    assert left.dropped == {"contaminated": len(expected)}
    others = [row for i, row in enumerate(rows) if i != expected[0]]
    with pytest.raises(UserError, match=r"1 of its .* pairs are not in the data"):
        load(others, "--drop_contaminated", listed, file="others.jsonl")
    listed.write_text(json.dumps({"sampled": True, "contamination": result}))
    with pytest.raises(UserError, match="made from a sample"):
        load(rows, "--drop_contaminated", listed)
