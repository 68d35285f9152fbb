"""The length analysis: every count against a plain slow reference, published percentiles, its rules and warnings."""

import itertools
import os
import shutil

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from bench.lengths import sample_lengths
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data import tokenization
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.planning import dataset_report
from sfm_dpo.planning.dataset import analyze_dataset
from sfm_dpo.planning.lengths import (
    CANDIDATES,
    PERCENTILES,
    STEPS,
    analyze_lengths,
    compute_coverage,
    list_lengths,
)
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer


def lengths_of(kind: str, n: int) -> Lengths:
    return Lengths(*sample_lengths(kind, n).values(), np.zeros(n, dtype=np.int64))


def turn(role, text):
    return {"role": role, "content": text}


def pair(i: int, chosen: str | None = None, rejected: str | None = None) -> dict:
    lead = [turn("user", "Hi"), turn("assistant", "Hello")] * (i % 2)
    prompt = [*lead, turn("user", f"How many apples? {i}")]
    return {
        "chosen": [*prompt, turn("assistant", f"{i} apples" if chosen is None else chosen)],
        "rejected": [*prompt, turn("assistant", f"I do not know, {i}" if rejected is None else rejected)],
    }


@pytest.fixture
def analyze(write_rows, tiny_folder):
    """A function: rows, options -> what analyze_dataset finds."""

    def run(rows, *options, model=None, file="pairs.jsonl", min_coverage=0.9, min_tokens_kept=0.9):
        argv = ["--dataset_name", write_rows(file, rows), "--model_name_or_path", model or tiny_folder("llama")]
        config = parse_config([str(word) for word in (*argv, *options)], training=False)
        return analyze_dataset(config, min_coverage, min_tokens_kept)

    return run


def count_tokens(sequences, response_tokens) -> int:
    """FLOPs of a model whose every token costs one."""
    return int(sequences.sum())


# ---- a slow reference: rows one at a time, plain Python, following TRL's collator


def slow_tokens(rows: list[dict], tokenizer) -> list[tuple[list, list, list]]:
    out = []
    for row in rows:
        sides = [row["chosen"], row["rejected"]]
        prompt = row["chosen"][:-1]
        if sides[0] == sides[1] or not all(side[-1]["content"].strip() for side in sides):
            continue
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        chosen, rejected = (tokenizer.apply_chat_template(side, return_dict=False) for side in sides)
        assert chosen[: len(ids)] == ids == rejected[: len(ids)]
        out.append((ids, chosen[len(ids) :], rejected[len(ids) :]))
    return out


def slow_row(pairs, max_length: int, max_prompt_length: int | None) -> dict:
    whole = no_signal = dropped = cut = responses = tokens = 0
    for prompt, chosen, rejected in pairs:
        shown = prompt if max_prompt_length is None else prompt[-max_prompt_length:]
        cut += len(shown) < len(prompt)
        if len(shown) >= max_length:
            dropped += 1
            continue
        sides = [(shown + side)[:max_length] for side in (chosen, rejected)]
        whole += sides == [prompt + chosen, prompt + rejected]
        no_signal += sides[0] == sides[1]
        responses += sum(len(side) - len(shown) for side in sides)
        tokens += sum(map(len, sides))
    return {
        "untouched": whole / len(pairs),
        "tokens_kept": responses / sum(len(c) + len(r) for _, c, r in pairs),
        "no_signal": no_signal,
        "dropped": dropped,
        "prompts_cut": cut,
        "response_tokens": responses,
        "tokens": tokens,
    }


@pytest.mark.parametrize("limit", [None, 60])
def test_counts_are_those_of_a_slow_reference(limit, analyze, tiny_folder):
    rng = np.random.default_rng(0)
    rows = [pair(i * 10**50, *("aé" * int(n) for n in rng.integers(0, 300, 2))) for i in range(120)]
    rows += [pair(1, "same", "same"), pair(2, "", "b"), *(pair(i, "a" * 400, "a" * 401) for i in range(3))]
    result = analyze(rows, *([] if limit is None else ["--max_prompt_length", str(limit)]))
    slow = slow_tokens(rows, AutoTokenizer.from_pretrained(tiny_folder("llama")))
    dropped = len(rows) - len(slow)
    assert dropped >= 2
    assert (result["rows"], result["pairs"], sum(result["dropped"].values())) == (len(rows), len(slow), dropped)
    sizes = {
        "total": [len(p) + max(len(c), len(r)) for p, c, r in slow],
        "prompt": [len(p) for p, _, _ in slow],
        "chosen": [len(c) for _, c, _ in slow],
        "rejected": [len(r) for _, _, r in slow],
    }
    for side, values in sizes.items():
        for q in PERCENTILES:  # the smallest value that at least q% do not exceed
            expected = next(v for i, v in enumerate(sorted(values), 1) if 100 * i >= q * len(values))
            assert result["percentiles"][side][str(q)] == {"tokens": expected}
    for row in [*result["candidates"], result["recommendation"]]:
        expected = slow_row(slow, row["max_length"], row["max_prompt_length"])
        assert {k: row[k] for k in expected} == pytest.approx(expected)
    assert result["length_bias"]["chosen_longer"] == pytest.approx(
        sum((len(c) > len(r)) + 0.5 * (len(c) == len(r)) for _, c, r in slow) / len(slow)
    )


def test_responses_identical_after_truncation_are_found_by_comparing_tokens():
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(300):  # two symbols, so that responses share beginnings of many lengths
        start = rng.integers(0, 2, rng.integers(0, 12)).tolist()
        sides = [start + rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(2)]
        if sides[0] != sides[1]:
            pairs.append(([7] * int(rng.integers(1, 9)), *sides))
    columns: dict[str, list] = {}
    for i, name in enumerate(("prompt", "chosen", "rejected")):
        columns[f"{name}_ids"] = [pair[i] for pair in pairs]
        columns[f"{name}_length"] = [len(pair[i]) for pair in pairs]
    columns["shared_length"] = [len(os.path.commonprefix(pair[1:])) for pair in pairs]  # noqa: RUF071 (of lists)
    lengths = Lengths.of(datasets.Dataset.from_dict(columns))
    for max_length in range(2, 24):
        for limit in (None, 1, 5):
            expected = slow_row(pairs, max_length, limit)
            row = compute_coverage(lengths, max_length, limit)
            assert {k: row[k] for k in expected} == pytest.approx(expected)
    assert compute_coverage(lengths, 9, None)["no_signal"] > 10


PUBLISHED = {"think": {4096: 0.751, 8192: 0.877, 16384: 0.958}, "instruct": {4096: 0.962}}  # share of complete pairs


@pytest.mark.parametrize(("kind", "expected"), [("think", (15360, 16384)), ("instruct", (3456, 3584, 3712))])
def test_the_published_shares_are_found_and_the_published_length_recommended(kind, expected):
    result = analyze_lengths(lengths_of(kind, 20_000), count_tokens, min_coverage=0.95, min_tokens_kept=0.8)
    assert result["recommendation"]["max_length"] in expected
    for row in result["candidates"]:
        assert row["flops"] == 4 * row["tokens"]  # three forwards to train, and the reference's
        if share := PUBLISHED[kind].get(row["max_length"]):
            assert row["untouched"] == pytest.approx(share, abs=0.02)


# ---- the recommendation


def conversations(seed: int, n: int = 1500, system: int = 0) -> Lengths:
    """Long prompts and short answers, as in chat with several turns."""
    rng = np.random.default_rng(seed)
    prompt, chosen, rejected = (
        np.maximum(1, np.exp(rng.normal(np.log(mean) - sigma**2 / 2, sigma, n))).astype(np.int64)
        for mean, sigma in ((149, 0.9), (42, 1.1), (52, 1.1))
    )
    return Lengths(prompt + system, chosen, rejected, np.zeros(n, dtype=np.int64))


@pytest.mark.parametrize("min_tokens_kept", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("min_coverage", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("lengths", [conversations(0), conversations(1, system=400), lengths_of("instruct", 1500)])
def test_both_lengths_together_meet_the_rule_and_the_next_shorter_one_does_not(lengths, min_coverage, min_tokens_kept):
    pairs = [
        ([0] * p, [1] * c, [2] * r) for p, c, r in zip(lengths.prompt, lengths.chosen, lengths.rejected, strict=True)
    ]

    def meets(row):
        return row["untouched"] >= min_coverage and row["tokens_kept"] >= min_tokens_kept

    result = analyze_lengths(lengths, count_tokens, min_coverage=min_coverage, min_tokens_kept=min_tokens_kept)
    best = result["recommendation"]
    row = slow_row(pairs, best["max_length"], best["max_prompt_length"])
    assert meets(row) and {key: best[key] for key in row} == pytest.approx(row)
    step = 128 if best["max_length"] <= 4096 else 1024
    assert best["max_length"] % step == 0
    if best["max_length"] > 128:
        [below] = [r for r in result["candidates"] if r["max_length"] == best["max_length"] - step]
        assert not meets(slow_row(pairs, below["max_length"], below["max_prompt_length"]))
        assert not meets(slow_row(pairs, below["max_length"], None))
    without = slow_row(pairs, best["max_length"], None)
    if best["max_prompt_length"] is None:
        assert not best["saved"] and not best["prompts_cut"]
    else:  # it helps, and costs no more whole pairs than it saves
        assert best["saved"] == without["dropped"] - row["dropped"] > 0
        assert round((without["untouched"] - row["untouched"]) * len(pairs)) <= best["saved"]
        assert row["response_tokens"] > without["response_tokens"]


def test_the_line_to_paste_says_how_many_prompts_are_cut():
    n = np.arange(1, 1001)
    lengths = Lengths(np.where(n % 25, n % 50 + 1, 5000), n, n // 2, 0 * n)
    result = analyze_lengths(lengths, count_tokens, min_coverage=0.95, min_tokens_kept=0.9)
    assert "40 prompts, of which 40 would leave no room" in dataset_report.format_recipe_lines(result)


def test_nothing_beyond_the_models_limit_is_considered():
    assert list_lengths(CANDIDATES, 10_000, None) == list_lengths(CANDIDATES, 10_000, 10**6) == list(CANDIDATES[:7])
    assert list_lengths(CANDIDATES, 10_000, 1024) == [256, 512, 1024]
    assert list_lengths(CANDIDATES, 10_000, 600) == [256, 512, 600]
    assert list_lengths(STEPS, 100, 2048) == [128]
    think = lengths_of("think", 500)
    result = analyze_lengths(think, count_tokens, min_coverage=0.99, min_tokens_kept=0.99, limit=4096)
    best = result["recommendation"]
    assert best["max_length"] == 4096 and best["reason"].startswith("No max_length")
    with pytest.raises(UserError, match="limit of 10 tokens"):
        analyze_lengths(think, count_tokens, min_coverage=0.9, min_tokens_kept=0.9, limit=10)


# ---- findings, and the path of training


def test_findings_name_what_is_wrong(analyze, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder("llama"), tmp_path / "thinking")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
    tokenizer.save_pretrained(tmp_path / "thinking")
    rows = [pair(i) for i in range(40)] + [pair(3), pair(5, chosen="five")]
    rows += [pair(90, chosen="same", rejected="same"), pair(91, chosen="")]
    rows += [pair(92, chosen="x" * 600 + "a", rejected="x" * 600 + "b")]
    rows += [pair(93) | {"chosen": [turn("user", "another"), turn("assistant", "a")]}]
    call, answer = turn("assistant", "") | {"tool_calls": [{"name": "f"}]}, turn("tool", "7")
    tools = [turn("system", "s"), turn("user", "q"), call, answer, turn("assistant", "I cannot help with that.")]
    rows += [{"chosen": tools, "rejected": [*tools[:2], turn("assistant", "no")]}]
    result = analyze(rows, model=tmp_path / "thinking", min_coverage=0.5, min_tokens_kept=0.2)
    assert result["recommendation"]["max_length"] == 128
    assert result["dropped"] == {"chosen_equals_rejected": 1, "empty_response": 1, "prompts_differ": 1}
    findings = [(finding["level"], finding["text"]) for finding in result["findings"]]
    for level, words in (
        ("warning", "the rejected response is the longer one in 96.6% of the pairs"),
        ("warning", "1 pairs are exact repeats"),
        ("warning", "1 pairs are identical on both sides after truncation"),
        ("warning", "44 prompts are no token prefix"),
        ("warning", "1 of 47 rows dropped: prompts of the two sides differ"),
        ("note", "1 pairs (1 chosen, 0 rejected): the answer refuses"),
    ):
        assert sum(level == known and words in text for known, text in findings) == 1, (words, findings)
    assert "<think>" not in result["example"]["chosen"]["text"]


def test_a_sample_is_the_same_with_one_and_two_processes(analyze):
    rows, results = [pair(i, chosen="a" * (i * 7 % 50 + 1)) for i in range(250)], []
    for workers in ("1", "2"):
        more = ("--dataset_num_proc", workers, "--max_samples", "200")
        # Files of different names: nothing is read from the cache
        results.append(analyze(rows, *more, file=f"pairs-{workers}.jsonl") | {"dataset": []})
    part = results[0]
    assert part == results[1] and part["sampled"] and (part["pairs"], part["usable"]) == (200, 250)
    assert "a sample of 250" in dataset_report.format_analysis(part)
    assert not analyze(rows, "--max_samples", "250")["sampled"]


def test_training_finds_the_tokens_in_the_cache(write_rows, tiny_folder, monkeypatch):
    argv = ["--dataset_name", str(write_rows("pairs.jsonl", [pair(i) for i in range(60)])), "--eval_fraction", "0.1"]
    config = parse_config([*argv, "--model_name_or_path", str(tiny_folder("llama"))], training=False)
    analyze_dataset(config, 0.9, 0.9)
    pairs, tokenizer = load_pairs(config), tokenization.load_tokenizer(config)

    def refuse(*args, **kwargs):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(tokenizer, "apply_chat_template", refuse)
    for split in (pairs.train, pairs.eval):
        tokens, _ = tokenization.tokenize_pairs(split, tokenizer, 256, 25)
        assert len(tokens) == len(split) and max(tokens["prompt_length"]) == 25


@pytest.mark.parametrize("n", [1, 40])
def test_page_and_picture(n, analyze, tmp_path):
    """Also of a single pair. The example is cut where training starts."""
    result = analyze([pair(i, chosen="<script>alert(1)</script> & apples " + "a" * i) for i in range(n)])
    shown = result["example"]
    assert shown["prompt"]["text"].endswith("<|im_start|>assistant\n")
    assert shown["chosen"]["text"].startswith("<script>alert") and shown["chosen"]["text"].endswith("<|im_end|>\n")
    dataset_report.write_page(result, tmp_path / "page.html")
    dataset_report.write_plot(result, tmp_path / "picture.png")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1 and "<script" not in page and "&lt;script&gt;" in page
    assert "src=" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
    text = dataset_report.format_analysis(result)
    for rows in dataset_report.build_tables(result).values():
        for cell in itertools.chain(*rows):
            assert f">{cell}</t" in page and cell in text
