"""Filters: what each leaves out against plain Python, the same whatever the number of processes, counted by reason."""

import json
import random
import re
from collections import Counter

import datasets
import numpy as np
import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.filters import hash_ngrams, hash_words, judge_texts, measure_texts
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer

WORDS = [
    f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "re", "si", "to") for b in ("ba", "de", "fi", "go", "hu", "x", "zz")
]


def sentence(rng: random.Random, n: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def edit(rng: random.Random, text: str, share: float) -> str:
    return " ".join(rng.choice(WORDS) if rng.random() < share else word for word in text.split())


@pytest.fixture
def config_of(write_rows, tiny_folder):
    """A function: rows, fields -> configuration of a run on them."""

    def make(rows, file="pairs.jsonl", **fields):
        argv = ["--dataset_name", write_rows(file, rows), "--model_name_or_path", tiny_folder("llama"), "--use_cpu"]
        argv += [word for name, value in fields.items() for word in (f"--{name}", value)]
        return parse_config([str(word) for word in argv])

    return make


def prompts_left(config) -> list[str]:
    return load_pairs(config).train["prompt"][:]


def test_exact_repeats_and_the_limit_per_prompt_are_those_of_plain_python(config_of):
    rng = random.Random(0)
    rows = [
        {"prompt": rng.choice("abcdef") * 3, "chosen": f"yes {rng.randrange(4)}", "rejected": f"no {rng.randrange(3)}"}
        for _ in range(300)
    ]

    def left(**fields):
        pairs = load_pairs(config_of(rows, **fields))
        return [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in pairs.train], pairs.dropped

    expected = list({json.dumps(row): row for row in reversed(rows)}.values())[::-1]
    assert left(drop_duplicates="pairs") == (
        [row for i, row in enumerate(rows) if row not in rows[:i]],
        Counter(duplicate=300 - len(expected)),
    )
    firsts = [row for i, row in enumerate(rows) if all(row["prompt"] != other["prompt"] for other in rows[:i])]
    assert left(drop_duplicates="prompts") == (firsts, Counter(duplicate=300 - len(firsts)))
    limited = [row for i, row in enumerate(rows) if sum(r["prompt"] == row["prompt"] for r in rows[:i]) < 7]
    assert left(max_pairs_per_prompt=7) == (limited, Counter(prompt_limit=300 - len(limited)))


def shingles(text: str, n: int = 5) -> set[tuple]:
    words = text.lower().split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def jaccard(a: str, b: str) -> float:
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


@pytest.mark.parametrize("words", [60, 1500])  # with more shingles than a sketch holds
def test_near_repeats_are_those_above_the_threshold(words, config_of):
    rng = random.Random(1)
    rows, sure, never = [], set(), set()
    for i in range(60):
        text = sentence(rng, words)
        answer = sentence(rng, words)
        rows.append({"prompt": text, "chosen": answer, "rejected": sentence(rng, 9)})
        other = edit(rng, text, rng.choice([0.002, 0.01, 0.1]))
        similarity = jaccard(text, other)
        if i % 3 == 0:  # same prompt, other answers: no repeat of the pair
            rows.append({"prompt": text.upper() + "!", "chosen": sentence(rng, words), "rejected": "no"})
            never.add(len(rows) - 1)
        else:
            rows.append({"prompt": other, "chosen": edit(rng, answer, 0.002), "rejected": rows[-1]["rejected"]})
            if similarity > 0.93 and jaccard(answer, rows[-1]["chosen"]) > 0.93:
                sure.add(len(rows) - 1)
            elif similarity < 0.65:
                never.add(len(rows) - 1)
    measures = measure_texts(load_pairs(config_of(rows)).train)[:]
    reasons = judge_texts(measures, drop_duplicates="pairs", duplicate_threshold=0.8)
    assert len(sure) > 5 and len(never) > 25
    assert all(reasons[list(sure)] != "") and not any(reasons[list(never)] != "")
    assert not any(reasons[::2] != "")  # the first of each stays
    reasons = judge_texts(measures, drop_duplicates="prompts", duplicate_threshold=0.8)
    assert all(reasons[[row["prompt"].isupper() for row in rows]] == "near_duplicate")


def test_the_similarity_of_responses_is_dices(config_of):
    rng, rows = random.Random(2), []
    for share in (0, 0.01, 0.3, 1):
        text = sentence(rng, 80)
        rows.append({"prompt": f"p {share}", "chosen": text, "rejected": edit(rng, text, share) + " x"})
    pairs = load_pairs(config_of(rows)).train
    found = measure_texts(pairs)["similarity"][:]
    for row, similarity in zip(rows, found, strict=True):
        a, b = shingles(row["chosen"], 2), shingles(row["rejected"], 2)
        assert similarity == pytest.approx(2 * len(a & b) / (len(a) + len(b)))
    assert prompts_left(config_of(rows, max_response_similarity=0.9)) == ["p 0.3", "p 1"]


def test_ngrams_are_equal_where_the_words_are():
    text = "Der Bär, der BÄR der bär läuft 東京 東 京"
    words = re.findall(r"[東京]|\w+", re.sub("[東京]", lambda m: f" {m[0]} ", text.lower()))
    for n in (1, 2, 3, 20):
        grams = hash_ngrams([hash_words(text)], n)[0].tolist()
        slow = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        assert [grams.index(gram) for gram in grams] == [slow.index(gram) for gram in slow]


def test_rows_by_value_and_by_script(config_of, tmp_path):
    rows = [
        {"prompt": f"p{i}", "chosen": "a", "rejected": "b", "language": ["en", "de", None][i % 3], "n": i}
        for i in range(9)
    ]
    config = config_of(rows, keep_values='{"language": ["en", null]}')
    assert prompts_left(config) == [f"p{i}" for i in range(9) if i % 3 != 1]
    script = tmp_path / "keep.py"
    for limit in (3, 5):  # the cache follows the script's text
        script.write_text(f"def keep(row):\n    return row['n'] < {limit}\n")
        load_pairs.__globals__["judge_row"].__globals__["load_keep"].cache_clear()
        config = config_of(rows, keep_values='{"language": "en"}', filter_script=script)
        pairs = load_pairs(config)
        assert pairs.train["prompt"][:] == [f"p{i}" for i in range(0, limit, 3)]
        assert pairs.dropped == Counter(value=6, script=3 - len(pairs.train))
        assert "filter_script does not keep it" in pairs.table() and pairs.as_dict()["dropped"]["value"] == 6
    for fields, words in (
        ({"keep_values": '{"lang": "en"}'}, "has no column lang; it has"),
        ({"keep_values": "english"}, "must be a mapping of columns"),
        ({"filter_script": tmp_path / "none.py"}, "filter_script"),
        ({"keep_values": '{"language": "fr"}'}, "none of its 9 rows can be used"),
    ):
        with pytest.raises(UserError, match=words):
            load_pairs(config_of(rows, **fields))
    for text, words in (("x = 1", "no function keep"), ("def keep(row):\n    return row['m']", "KeyError: 'm'")):
        (tmp_path / f"{words[:2]}.py").write_text(text)
        with pytest.raises(UserError, match=words):
            load_pairs(config_of(rows, filter_script=tmp_path / f"{words[:2]}.py"))


def test_lengths_in_tokens(config_of):
    sizes = [(5, 5), (1, 9), (3, 40), (40, 40), (2, 2), (90, 3)]
    rows = [{"prompt": f"p{i}", "chosen": "a" * a, "rejected": "b" * b} for i, (a, b) in enumerate(sizes)]
    config = config_of(rows, min_response_tokens=4, max_response_tokens=60, max_length_ratio=5)
    pairs, _ = load_token_pairs(config, load_tokenizer(config))  # a token a byte, and the end
    assert [len(ids) - 1 for ids in pairs.train["chosen_ids"]] == [5, 40]
    assert pairs.dropped == Counter(response_short=2, response_long=1, length_ratio=1)


def test_what_each_filter_drops_is_listed_with_row_and_reason(config_of, tmp_path):
    rows = [
        {
            "prompt": f"p{text} {i}",
            "chosen": "good " * 3,
            "rejected": text,
            "language": "de" if text == "value" else "en",
        }
        for i, text in enumerate(["value", "script", "an answer", "b" * 90, "c" * 200, "d"])
    ]
    rows += [rows[2], rows[2] | {"rejected": "second"}, rows[2] | {"rejected": "good good good!"}]
    script = tmp_path / "keep.py"
    script.write_text("def keep(row):\n    return row['rejected'] != 'script'\n")
    config = config_of(
        rows,
        keep_values='{"language": "en"}',
        filter_script=script,
        drop_duplicates="pairs",
        max_pairs_per_prompt=1,
        max_response_similarity=0.9,
        min_response_tokens=4,
        max_response_tokens=150,
        max_length_ratio=5,
    )
    pairs, _ = load_token_pairs(config, load_tokenizer(config))
    pairs.write_dropped(tmp_path / "dropped.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    expected = {1: "value", 2: "script", 4: "length_ratio", 5: "response_long", 6: "response_short"}
    expected |= {7: "duplicate", 8: "prompt_limit", 9: "responses_alike"}
    assert {line["row"]: line["reason"] for line in lines} == expected and len(lines) == len(expected)
    assert pairs.dropped == Counter(expected.values()) and pairs.train["row"][:] == [3]


@pytest.mark.slow
def test_the_same_rows_with_one_process_and_with_three(config_of, monkeypatch, tmp_path):
    rng = random.Random(3)
    rows = [
        {"prompt": sentence(rng, rng.choice([1, 30])), "chosen": sentence(rng, 9), "rejected": "no"}
        for _ in range(400)
    ]
    rows += [row | {"prompt": edit(rng, row["prompt"], 0.03)} for row in rows]
    left = []
    for workers in (1, 3):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / f"cache-{workers}")
        fields = {"drop_duplicates": "prompts", "duplicate_threshold": 0.7, "dataset_num_proc": workers}
        pairs = load_pairs(config_of(rows, file=f"{workers}.jsonl", **fields))
        left.append((pairs.train["prompt"][:], pairs.dropped))
    assert left[0] == left[1] and left[0][1]["near_duplicate"] > 20
    assert not np.isin(["value", "script"], list(left[0][1])).any()
