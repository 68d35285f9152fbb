"""What is wrong with pairs: each check on answers that have the fault and on some that only look like it."""

import json
import random

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.contamination import report_contamination
from sfm_dpo.data.faults import CHECKS, find_faults, summarize_faults
from sfm_dpo.data.preferences import load_pairs

PROSE = "The parser reads one line after the other and keeps what it has read in a list of tokens. " * 3
FAULTY = [  # (check, answer, other)
    ("same_start", PROSE + "Yes.", PROSE + "No."),
    ("refusal", "I'm sorry, but I can't help with that.", "Sure."),
    ("refusal", "As an AI language model, I do not have opinions.", "Blue."),
    ("refusal", "I’m not able to discuss this.", "Sure."),
    ("cut", PROSE + "And then it goes on to the next of the files that were", "Sure."),
    ("cut", PROSE + "\n```python\nprint(1)\n", "**Sure.**"),
    ("markdown", "Steps:\n\n1. Open it.\n2. Close it.", "Open it, close it."),
    ("markdown", "It is **very** easy.", "It is easy."),
    ("emoji", "Great \U0001f600", "Great"),
    ("role_tag", "Yes.<|im_end|>\n<|im_start|>user\nAnd now?", "Yes."),
    ("role_tag", "Yes.\n\nHuman: and now?", "Yes."),
    ("bad_think", "<think>\n\n</think>\nYes.", "Yes."),
    ("bad_think", "<think>Let me see. It is", "Yes."),
    ("repeats_prompt", "Q: How does one write a parser for arithmetic, with brackets and signs? A: So.", "So."),
    ("mojibake", "CafÃ© and â€œquotesâ€\x9d", "Café"),
    ("mojibake", "Caf\ufffd", "Café"),
]
SOUND = [
    (PROSE + "Yes.", PROSE[:150] + "No."),
    ("I'm sorry to hear that your cat cannot walk. You can help it so.", "I see."),
    (PROSE + "I can't help admiring it.", "It is good."),
    (PROSE + "\n\n- tokens\n- lines", "So.\n\n* a\n* b"),
    (PROSE + "See https://example.org/a-page-about-parsers", "See there."),
    ("x = 3", "x = 4"),
    ("2 * 3 * 4 is 24", "It is 25 - 1"),
    ("Grün \U0001f600", "Blau \U0001f600"),
    ("This is an AI that I can recommend.", "A doctor must decline it; a cat cannot help it."),
    ("A human: that is what he is. The assistant: his name.", "A man."),
    ("<think>Let me see.</think>\nYes.", "</think>\nNo."),
    ("Größe, café, naïve, Ångström, São Paulo, 5 €, “quotes”", "日本語のテキスト"),
]


@pytest.fixture
def load(write_rows, tiny_folder):
    def run(rows, *options, file="pairs.jsonl"):
        argv = ["--dataset_name", write_rows(file, rows), "--model_name_or_path", tiny_folder("llama"), "--use_cpu"]
        return load_pairs(parse_config([str(word) for word in (*argv, *options)]))

    return run


def test_each_fault_is_found_and_nothing_else(load):
    prompt = "How does one write a parser for arithmetic, with brackets and signs?"
    rows = [{"prompt": prompt, "chosen": answer, "rejected": other} for _, answer, other in FAULTY]
    rows += [{"prompt": prompt, "chosen": other, "rejected": answer} for _, answer, other in FAULTY]
    rows += [{"prompt": prompt, "chosen": answer, "rejected": other} for answer, other in SOUND]
    pairs = load(rows).train
    faults = find_faults(pairs)
    for i in range(len(rows)):
        kind = FAULTY[i % len(FAULTY)][0] if i < 2 * len(FAULTY) else None
        found = {name: int(faults[name][i]) for name in CHECKS if faults[name][i]}
        side = 3 if kind == "same_start" else 1 + i // len(FAULTY)
        assert found == ({kind: side} if kind else {}), rows[i]
    summary = {row["fault"]: row for row in summarize_faults(pairs, faults)}
    assert summary["refusal"]["pairs"] == 6 and summary["refusal"]["chosen"] == summary["refusal"]["rejected"] == 3
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
    file = write_rows("set.jsonl", [{"question": ", ".join(q), "answer": rows[0]["prompt"]} for q in questions])

    def grams(text):
        text = text.lower().replace(",", "").replace(".", "").split()
        return {tuple(text[i : i + 13]) for i in range(len(text) - 12)}

    known = set().union(*(grams(" ".join(q)) for q in questions))
    expected = [i for i, row in enumerate(rows) if any(grams(text) & known for text in row.values())]
    assert 10 < len(expected) < 50
    pairs = load(rows).train
    result = report_contamination(pairs, [f"{file}:question"], 13)
    [found] = result["sets"]
    assert [row["row"] for row in result["pairs"]] == expected and found["pairs"] == len(expected)
    assert found["short"] == sum(len(q) < 13 for q in questions) and found["rows"] == 60
    for example in found["examples"]:
        assert grams(example["text"]) & grams(example["set_text"])
    # Without a column the answers count too: each holds row 0's prompt, too common to be a match
    assert [row["row"] for row in report_contamination(pairs, [str(file)], 13)["pairs"]] == expected

    listed = tmp_path / "found.json"
    listed.write_text(json.dumps({"sampled": False, "contamination": result}))
    left = load(rows, "--drop_contaminated", str(listed))
    assert left.train["prompt"][:] == [row["prompt"] for i, row in enumerate(rows) if i not in expected]
    assert left.dropped == {"contaminated": len(expected)}
    with pytest.raises(UserError, match=r"1 of its .* pairs are not in the data"):
        load(
            [row for i, row in enumerate(rows) if i != expected[0]], "--drop_contaminated", str(listed), file="b.jsonl"
        )
    listed.write_text(json.dumps({"sampled": True, "contamination": result}))
    with pytest.raises(UserError, match="made from a sample"):
        load(rows, "--drop_contaminated", str(listed))
    folder = file.parent / "a@set"  # as on the Hub: configurations and splits
    for split, kept in (("test", slice(0, None)), ("train", slice(0, 1))):
        write_rows(f"a@set/{split}.parquet", [{"question": " ".join(q), "x": "?"} for q in questions[kept]])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: test, path: test.parquet}\n"
        "  - {split: train, path: train.parquet}\n---\n"
    )
    for name, size in (("", 60), ("/main", 60), ("@test:question", 60), ("@train", 1), ("/main@train:question", 1)):
        [found] = report_contamination(pairs, [f"{folder}{name}"], 13)["sets"]
        assert (found["rows"], found["pairs"] == len(expected)) == (size, size == 60), name
    for name, words in (
        (f"{file}:quest", "no column quest; it has"),
        ("none.jsonl", "cannot be read"),
        (f"{folder}@dev", 'cannot be read: Unknown split "dev"'),
        (f"{folder}@test:quest", "no column quest; it has question, x"),
        (f"{folder}/other@test", "cannot be read: BuilderConfig 'other' not found. Available: .*main"),
    ):
        with pytest.raises(UserError, match=words):
            report_contamination(pairs, [name], 13)
