"""The length analysis: every count against a plain slow reference, published percentiles, its rules and warnings."""

import itertools
import json
import math
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.trainer_pt_utils import get_length_grouped_indices

from bench.dolci_lengths import CHOSEN, PROMPT, REJECTED, TOTAL, draw
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data import tokenization
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.token_lengths import Lengths, measure_lengths
from sfm_dpo.planning import dataset_report
from sfm_dpo.planning.dataset import analyze_dataset
from sfm_dpo.planning.lengths import (
    CANDIDATES,
    PERCENTILES,
    analyze_lengths,
    compute_coverage,
    compute_padding,
    list_candidates,
    percentile_interval,
)
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer


def lengths_of(kind: str, n: int) -> Lengths:
    return Lengths(*draw(kind, n), np.zeros(n, dtype=np.int64))


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
        argv = [
            "--dataset_name",
            str(write_rows(file, rows)),
            "--model_name_or_path",
            str(model or tiny_folder("llama")),
        ]
        return analyze_dataset(parse_config([*argv, *options], training=False), min_coverage, min_tokens_kept)

    return run


# ---- a slow reference: rows one at a time, plain Python, following TRL's collator


def slow_tokens(rows: list[dict], tokenizer) -> list[tuple[list, list, list]]:
    out = []
    for row in rows:
        if "prompt" in row:
            prompt = [turn("user", row["prompt"])]
            sides = [prompt + row["chosen"], prompt + row["rejected"]]
        else:
            sides = [row["chosen"], row["rejected"]]
            prompt = [a for a, b in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(*sides, strict=False))]
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


@pytest.mark.parametrize("has_prompt", [True, False])
@pytest.mark.parametrize("limit", [None, 60])
def test_counts_are_those_of_a_slow_reference(has_prompt, limit, analyze, tiny_folder):
    rng = np.random.default_rng(0)
    rows = [pair(i, *("aé" * int(n) for n in rng.integers(0, 300, 2))) for i in range(120)]
    rows += [pair(1, "same", "same"), pair(2, "", "b"), *(pair(i, "a" * 400, "a" * 401) for i in range(3))]
    if has_prompt:
        for i, row in enumerate(rows):
            row["prompt"] = "p" * int(rng.integers(1, 300)) + str(i)
            row |= {side: row[side][-1:] for side in ("chosen", "rejected")}
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
        ranked, facts = sorted(values), result["percentiles"][side]
        assert facts["mean"] == pytest.approx(sum(values) / len(values))
        for q in PERCENTILES:  # the smallest value that at least q% do not exceed
            expected = next(v for i, v in enumerate(ranked, 1) if 100 * i >= q * len(ranked))
            assert facts[str(q)] == {"tokens": expected}
    for row in [*result["candidates"], result["recommendation"]]:
        expected = slow_row(slow, row["max_length"], row["max_prompt_length"])
        assert {k: row[k] for k in expected} == pytest.approx(expected)
    if limit:
        assert {row["max_prompt_length"] for row in result["candidates"]} == {limit}
    assert result["length_bias"]["chosen_longer"] == pytest.approx(
        sum((len(c) > len(r)) + 0.5 * (len(c) == len(r)) for _, c, r in slow) / len(slow)
    )


def test_cuts_to_the_same_tokens_and_repeats_are_found_by_comparing_them():
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(300):  # two symbols, so that responses share beginnings of many lengths
        start = rng.integers(0, 2, rng.integers(0, 12)).tolist()
        sides = [start + rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(2)]
        if sides[0] != sides[1]:
            pairs.append(([7] * int(rng.integers(1, 9)), *sides))
    columns = {f"{n}_ids": [p[i] for p in pairs] for i, n in enumerate(("prompt", "chosen", "rejected"))}
    columns |= {k.replace("_ids", "_length"): [len(x) for x in v] for k, v in list(columns.items())}
    lengths, prompt_keys, pair_keys = measure_lengths(datasets.Dataset.from_dict(columns))
    assert len(set(prompt_keys.tolist())) == len({len(p) for p, _, _ in pairs})
    assert len(set(pair_keys.tolist())) == len({(len(p), *map(tuple, s)) for p, *s in pairs})
    for max_length in range(2, 24):
        for limit in (None, 1, 5):
            expected = slow_row(pairs, max_length, limit)
            row = compute_coverage(lengths, max_length, limit)
            assert {k: row[k] for k in expected} == pytest.approx(expected)
    assert compute_coverage(lengths, 9, None)["no_signal"] > 10


# ---- arithmetic


@pytest.mark.parametrize("kind", ["think", "instruct"])
def test_the_tables_reproduce_the_published_percentiles(kind):
    n = 20_000
    result = analyze_lengths(lengths_of(kind, n), min_coverage=0.95, min_tokens_kept=0.8)
    untouched = {row["max_length"]: row["untouched"] for row in result["candidates"]}
    for share, tokens in TOTAL[kind]:
        if tokens in untouched:
            assert untouched[tokens] == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / n))
        elif str(round(100 * share)) in result["percentiles"]["total"]:
            assert result["percentiles"]["total"][str(round(100 * share))]["tokens"] == pytest.approx(tokens, rel=0.06)
    for side, known in (("prompt", PROMPT), ("chosen", CHOSEN), ("rejected", REJECTED)):
        for q, tokens in zip(("50", "95"), known.get(kind, ()), strict=False):
            assert result["percentiles"][side][q]["tokens"] == pytest.approx(tokens, rel=0.06)
    assert result["recommendation"]["max_length"] in {"think": (15360, 16384), "instruct": (3456, 3584)}[kind]


@pytest.mark.parametrize("q", [50, 90, 95])
def test_intervals_hold_the_true_percentile_95_times_of_100(q):
    rng = np.random.default_rng(1)
    population = np.exp(rng.standard_normal(200_000) + 6).round()
    true, intervals = (
        np.percentile(population, q),
        [percentile_interval(rng.choice(population, 400), q) for _ in range(600)],
    )
    assert 0.93 <= np.mean([low <= true <= high for low, high in intervals]) <= 0.99


def test_padding_is_the_mean_over_all_batches_and_that_of_transformers_sampler():
    few = np.array([[3, 5], [10, 2], [7, 7], [1, 4], [20, 19]])
    many = lengths_of("think", 6000).truncate(8192).sequences
    order = get_length_grouped_indices(many.sum(axis=1).tolist(), 128, generator=torch.Generator().manual_seed(1))
    longest = many.max(axis=1)[order]
    for size in (1, 2, 4, 8):
        batches = list(itertools.combinations(range(5), min(size, 5)))  # 8: more than there are
        computed = sum(2 * len(rows) * few[list(rows)].max() for rows in batches)
        real = sum(few[list(rows)].sum() for rows in batches)
        assert compute_padding(few, 128)[str(size)]["stock"] == pytest.approx(1 - real / computed)
        computed = sum(2 * size * longest[i : i + size].max() for i in range(0, 6000, size))
        grouped = compute_padding(many, 128)[str(size)]["grouped"]
        assert grouped == pytest.approx(1 - many.sum() / computed, abs=0.01)


def test_flops_and_memory_of_an_epoch():
    lengths = Lengths(*(np.array(x) for x in ([10, 4, 200], [5, 6, 7], [8, 300, 9], [0, 0, 0])))
    calls, sizes = [], [10, 15, 18, 207, 209, 256]

    def forward(sequences, responses):
        calls.append((sorted(sequences.tolist()), responses))
        return int(sequences.sum())

    row = analyze_lengths(lengths, min_coverage=0, min_tokens_kept=0, forward_flops=forward)["candidates"][1]
    assert row["max_length"] == 256 and calls[1] == (sizes, 5 + 8 + 6 + 252 + 7 + 9)
    assert row["flops"] == 4 * sum(sizes) and row["peak_tokens"] == sum(sizes)


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

    result = analyze_lengths(lengths, min_coverage=min_coverage, min_tokens_kept=min_tokens_kept)
    best = result["recommendation"]
    row = slow_row(pairs, best["max_length"], best["max_prompt_length"])
    assert meets(row) and {key: best[key] for key in row} == pytest.approx(row)
    [shown] = [r for r in result["candidates"] if r["max_length"] == best["max_length"]]
    assert {key: best[key] for key in shown if key in best} == {key: shown[key] for key in shown if key in best}
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
        assert best["whole_cut"] == round((without["untouched"] - row["untouched"]) * len(pairs)) <= best["saved"]
        assert row["response_tokens"] > without["response_tokens"]


def test_a_limit_of_prompts_is_recommended_only_where_prompts_leave_no_room():
    n = np.arange(1, 1001)
    short = Lengths(n % 50 + 1, n, n // 2, 0 * n)
    best = analyze_lengths(short, min_coverage=0.95, min_tokens_kept=0.9)
    assert best["recommendation"]["max_prompt_length"] is None
    assert "max_prompt_length: not needed" in dataset_report.format_recipe_lines(best)
    long = Lengths(np.where(n % 25, short.prompt, 5000), short.chosen, short.rejected, short.shared)
    best = analyze_lengths(long, min_coverage=0.95, min_tokens_kept=0.9)
    lines = dataset_report.format_recipe_lines(best)
    assert best["recommendation"]["saved"] == 40 and best["recommendation"]["whole_cut"] == 0
    assert "40 would leave no room for a response, 0 are of pairs that fit whole" in lines


def test_nothing_beyond_the_models_limit_is_considered():
    assert list_candidates(10_000, None) == list_candidates(10_000, 1_000_000) == list(CANDIDATES)
    assert list_candidates(10_000, 8192) == [2048, 4096, 8192]
    assert list_candidates(10_000, 5000) == [2048, 4096, 5000]
    assert list_candidates(100, 2048) == [256, 512, 1024, 2048]
    result = analyze_lengths(lengths_of("think", 500), min_coverage=0.99, min_tokens_kept=0.99, limit=4096)
    best = result["recommendation"]
    assert best["max_length"] == 4096 and best["reason"].startswith("No max_length")
    with pytest.raises(UserError, match="limit of 10 tokens"):
        analyze_lengths(lengths_of("think", 500), min_coverage=0.9, min_tokens_kept=0.9, limit=10)


# ---- findings, and the path of training


def test_findings_name_what_is_wrong(analyze, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
    tokenizer.save_pretrained(tmp_path / "thinking")
    rows = [pair(i) for i in range(40)] + [pair(3), pair(5, chosen="five")]
    rows += [pair(90, chosen="same", rejected="same"), pair(91, chosen="")]
    rows += [pair(92, chosen="x" * 600 + "a", rejected="x" * 600 + "b")]
    result = analyze(rows, model=tmp_path / "thinking", min_coverage=0.5, min_tokens_kept=0.2)
    assert result["recommendation"]["max_length"] == 128
    assert result["dropped"] == {"chosen_equals_rejected": 1, "empty_response": 1}
    several = sum(len(row["chosen"]) > 2 for row in rows[:42]) / 43
    findings = [(finding["level"], finding["text"]) for finding in result["findings"]]
    for level, words in (
        ("warning", "the rejected response is the longer one in 98.8% of the pairs"),
        ("warning", "1 pairs are exact repeats"),
        ("warning", "1 pairs are cut to the same tokens"),
        ("warning", "43 prompts are no token prefix"),
        ("note", "1 pairs have the prompt of an earlier one and other responses"),
        ("note", f"{several:.1%} of the prompts are conversations with several user turns"),
    ):
        assert sum(level == known and words in text for known, text in findings) == 1, words
    assert "1 of 45 rows dropped: chosen equals rejected" in dataset_report.format_analysis(result)
    assert "<think>" not in result["example"]["chosen"]["text"]


def test_which_turns_are_trained_is_shown_by_source(write_rows, tiny_folder, tmp_path):
    system, call, result = (
        turn("system", "s"),
        turn("assistant", "") | {"tool_calls": [{"name": "f"}]},
        turn("tool", "7"),
    )
    lead, end = [turn("user", "<b>?"), turn("assistant", "<i>!")], [turn("user", "more"), turn("assistant", "end")]
    early = {"chosen": [*lead, *end], "rejected": [lead[0], turn("assistant", "other"), *end]}
    first = [pair(i) for i in range(5)] + [early]
    first += [{side: [system, *pair(1)[side]] for side in ("chosen", "rejected")}]
    second = [{"prompt": "q", "chosen": [call, result, *end[1:]], "rejected": [turn("assistant", "no")]}, early]
    second += [pair(7) | {"chosen": [turn("user", "another"), turn("assistant", "a")]}, pair(8)]
    second += [{"prompt": [turn("user", "q"), call, turn("user", "?")], "chosen": "a", "rejected": "b"}]
    paths = [str(write_rows(name, rows)) for name, rows in (("first.jsonl", first), ("second.jsonl", second))]
    (tmp_path / "r.yaml").write_text(json.dumps({"datasets": [{"path": path} for path in paths]}))
    argv = ["--config", str(tmp_path / "r.yaml"), "--model_name_or_path", str(tiny_folder("llama"))]
    found = analyze_dataset(parse_config(argv, training=False), 0.9, 0.9)
    assert found["turns"]["sources"] == [
        {
            "source": paths[0],
            "pairs": 6,
            "multi_turn": 3,
            "system": 1,
            "tools": 0,
            "multi_message": 0,
            "prompts_differ": 1,
        },
        {
            "source": paths[1],
            "pairs": 3,
            "multi_turn": 1,
            "system": 0,
            "tools": 2,
            "multi_message": 1,
            "prompts_differ": 2,
        },
    ]
    rest = "\nuser: more\nassistant: end"
    sides = {"chosen": f"assistant: <i>!{rest}", "rejected": f"assistant: other{rest}"}
    assert found["turns"]["example"] == {"row": 6, "source": paths[0], "shared": 1, **sides}
    text = dataset_report.format_analysis(found)
    assert "warning: 3 rows (25.00%) differ before the last assistant turn" in text
    assert f"row 6 of {paths[0]}, messages in common: 1\n" in text and repr(sides["rejected"]) in text
    dataset_report.write_page(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert f"<pre>assistant: &lt;i&gt;!{rest}</pre><pre>{sides['rejected']}</pre>" in page


def test_a_sample_has_intervals_and_is_the_same_with_one_and_two_processes(analyze, tmp_path, monkeypatch):
    rows, results = [pair(i, chosen="a" * (i * 7 % 50 + 1)) for i in range(250)], []
    for workers in ("1", "2"):  # of another file: nothing is read from the cache
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / f"cache-{workers}")
        more = ("--dataset_num_proc", workers, "--max_samples", "200")
        results.append(analyze(rows, *more, file=f"pairs-{workers}.jsonl") | {"dataset": []})
        results[-1]["turns"]["sources"][0]["source"] = "pairs"
    part = results[0]
    assert part == results[1] and part["sampled"] and (part["pairs"], part["usable"]) == (200, 250)
    low, high = part["percentiles"]["total"]["50"]["interval"]
    assert low <= part["percentiles"]["total"]["50"]["tokens"] <= high
    assert "a sample of 250" in dataset_report.format_analysis(part)
    whole = analyze(rows, "--max_samples", "250")
    assert not whole["sampled"] and "interval" not in whole["percentiles"]["total"]["50"]


@pytest.mark.parametrize("limit", [None, 25])
def test_training_finds_the_tokens_in_the_cache(write_rows, tiny_folder, monkeypatch, limit):
    argv = ["--dataset_name", str(write_rows("pairs.jsonl", [pair(i) for i in range(60)])), "--eval_fraction", "0.1"]
    config = parse_config([*argv, "--model_name_or_path", str(tiny_folder("llama"))], training=False)
    analyze_dataset(config, 0.9, 0.9)
    pairs, tokenizer = load_pairs(config), tokenization.load_tokenizer(config)

    def refuse(*args, **kwargs):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(tokenizer, "apply_chat_template", refuse)
    for split in (pairs.train, pairs.eval):
        tokens, counts = tokenization.tokenize_pairs(split, tokenizer, 256, limit)
        assert len(tokens) == len(split) and (counts["prompt_cut"] > 0) == (limit is not None)


@pytest.mark.parametrize("n", [1, 40])
def test_page_and_picture(n, analyze, tmp_path):
    """Also of a single pair. The example is cut where training starts."""
    result = analyze([pair(i, chosen="<script>alert(1)</script> & apples " + "a" * i) for i in range(n)])
    shown = result["example"]
    assert shown["prompt"]["text"].endswith("<|im_start|>assistant\n")
    assert shown["chosen"]["text"].startswith("<script>alert") and shown["chosen"]["text"].endswith("<|im_end|>\n")
    assert result["recommendation"]["max_length"] == (128 if n == 1 else 256)
    json.dumps(result, allow_nan=False)
    dataset_report.write_page(result, tmp_path / "page.html")
    dataset_report.write_plot(result, tmp_path / "picture.png")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1 and "<script" not in page and "&lt;script&gt;" in page
    assert "src=" not in page and "http" not in page.replace("http://www.w3.org", "")
    text = dataset_report.format_analysis(result)
    for cell in itertools.chain(*itertools.chain(*dataset_report.build_tables(result).values())):
        assert f">{cell}</t" in page and cell in text
    assert Path(tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"
