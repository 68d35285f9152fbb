"""The length analysis: every count against a plain slow reference, published percentiles, its rules and warnings."""

import shutil
import statistics

import numpy as np
import pytest
from transformers import AutoTokenizer

from bench.lengths import sample_lengths
from sfm_dpo.common.errors import UserError
from sfm_dpo.data.lengths import Lengths, count_trained
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.planning.dataset import analyze_dataset
from sfm_dpo.planning.length_advice import CANDIDATES, PERCENTILES, STEPS, analyze_lengths, list_lengths
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from tests.toolbox import assistant, config_of, user, with_tool


def pair(i: int, chosen: str = "{} apples", rejected: str = "I do not know, {}") -> dict:
    lead = [user("Hi"), assistant("Hello")] * (i % 2)
    prompt = [*lead, user(f"How many apples? {i}")]
    sides = {"chosen": chosen, "rejected": rejected}
    return {name: [*prompt, assistant(text.format(i))] for name, text in sides.items()}


@pytest.fixture
def analyze(write_rows, tiny_folder):
    """A function: rows, options -> what analyze_dataset finds."""

    def run(rows, *options, model=None, min_coverage=0.9, min_tokens_kept=0.9):
        config = config_of(write_rows("pairs.jsonl", rows), model or tiny_folder("llama"), *options)
        return analyze_dataset(config, min_coverage, min_tokens_kept)

    return run


def count_tokens(sequences, response_tokens) -> int:
    """FLOPs of a model whose every token costs one."""
    return int(sequences.sum())


def analyze_sample(lengths: Lengths, **options) -> dict:
    """The analysis of pairs without tool results."""

    def count(*limits) -> np.ndarray:
        return lengths.truncate(*limits).responses

    return analyze_lengths(lengths, count, count_tokens, **options)


def slow_tokens(rows: list[dict], tokenizer) -> list[tuple[list, list, list]]:
    """A slow reference: rows one at a time, plain Python, following TRL's collator."""
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


def slow_row(pairs, max_length: int, max_prompt_length: int | None, overlong: str = "truncate") -> dict:
    whole = dropped = equal = responses = tokens = 0
    for prompt, chosen, rejected in pairs:
        shown = prompt if max_prompt_length is None else prompt[-max_prompt_length:]
        longer = len(shown) + max(len(chosen), len(rejected)) > max_length
        if len(shown) >= max_length or (longer and overlong == "drop"):
            dropped += 1
            continue
        sides = [(shown + side)[:max_length] for side in (chosen, rejected)]
        if sides[0] == sides[1]:
            dropped += 1
            equal += 1
            continue
        whole += sides == [prompt + chosen, prompt + rejected]
        responses += sum(len(side) - len(shown) for side in sides)
        tokens += sum(map(len, sides))
    return {
        "untruncated": whole / len(pairs),
        "tokens_kept": responses / sum(len(c) + len(r) for _, c, r in pairs),
        "dropped": dropped,
        "equal": equal,
        "response_tokens": responses,
        "tokens": tokens,
    }


def slow_prompt_length(pairs, max_length: int) -> int | None:
    if all(len(prompt) < max_length for prompt, _, _ in pairs):
        return None
    room = int(statistics.median(max(len(chosen), len(rejected)) for _, chosen, rejected in pairs))
    return max_length - min(room, max_length // 2)


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_counts_are_those_of_a_slow_reference(overlong, analyze, tiny_folder):
    rng = np.random.default_rng(0)
    rows = [pair(i * 10**50, *("aé" * int(n) for n in rng.integers(0, 300, 2))) for i in range(120)]
    rows += [pair(1, "same", "same"), pair(2, "", "b"), *(pair(i, "a" * 400, "a" * 401) for i in range(3))]
    rows += [pair(i, "a" * 400, "a" * 300 + "b") for i in range(4)]  # equal once cut to 256
    rows += [{side: [user("Why? " * 90), *turns] for side, turns in pair(7).items()}]
    result = analyze(rows, "--overlong", overlong)
    slow = slow_tokens(rows, AutoTokenizer.from_pretrained(tiny_folder("llama")))
    dropped = len(rows) - len(slow)
    assert dropped >= 2
    assert (result["rows"], result["pairs"], sum(result["dropped"].values())) == (len(rows), len(slow), dropped)
    sizes = {"total": [len(p) + max(len(c), len(r)) for p, c, r in slow]}
    sizes |= {name: [len(parts[i]) for parts in slow] for i, name in enumerate(("prompt", "chosen", "rejected"))}
    for side, values in sizes.items():
        for q in PERCENTILES:  # the smallest value that at least q% do not exceed
            expected = next(v for i, v in enumerate(sorted(values), 1) if 100 * i >= q * len(values))
            assert result["percentiles"][side][str(q)] == expected
    assert any(row["equal"] for row in result["candidates"]) == (overlong == "truncate")
    for row in [*result["candidates"], result["recommendation"]]:
        assert row["max_prompt_length"] == slow_prompt_length(slow, row["max_length"])
        expected = slow_row(slow, row["max_length"], row["max_prompt_length"], overlong)
        assert {k: row[k] for k in expected} == pytest.approx(expected)
    longer = sum((len(c) > len(r)) + 0.5 * (len(c) == len(r)) for _, c, r in slow) / len(slow)
    assert result["length_bias"]["chosen_longer"] == pytest.approx(longer)


def test_tool_results_are_left_out_as_in_training(analyze, tiny_folder, tmp_path):
    """Also where a response begins with one."""
    rows = [
        {
            "prompt": [user(f"How many? {i}"), assistant("add(2)")],
            "chosen": with_tool("add", "see https://x.org " * 3, f"{i}")[i % 2 :],
            "rejected": with_tool("add", "2", "I do not know how many there are")[i % 2 :],
        }
        for i in range(12)
    ]
    result = analyze(rows, min_coverage=0, min_tokens_kept=0)
    assert result["length_bias"]["chosen_longer"] == 0
    for row in [row for row in result["candidates"] if row["dropped"]] or pytest.fail("nothing is dropped"):
        options = ("--max_length", row["max_length"], "--max_dropped_fraction", 1)
        config = config_of(tmp_path / "pairs.jsonl", tiny_folder("llama"), *options)
        pairs = load_token_pairs(config, load_tokenizer(config))
        train = pairs.train
        assert row["dropped"] == len(rows) - len(train)
        analyze_dataset(config, 0, 0, tmp_path / "listed.jsonl")
        pairs.write_dropped(tmp_path / "dropped.jsonl")
        assert (tmp_path / "listed.jsonl").read_text() == (tmp_path / "dropped.jsonl").read_text()
        assert row["response_tokens"] == count_trained(train, row["max_length"]).sum()


def sample(rare: int, count: int = 8, pairs: int = 200, prompt: int = 100) -> Lengths:
    """Pairs with prompts of 100 and answers of 300 tokens; in `count` of them the answers have `rare`, and the prompts
    `prompt` tokens."""
    is_rare = np.arange(pairs) < count
    answers = np.where(is_rare, rare, 300)
    return Lengths(np.where(is_rare, prompt, 100), answers, answers)


@pytest.mark.parametrize(
    ("lengths", "expected", "reason"),
    [
        (sample(700), (896, None), "; this cuts fewer for 2.8% more time.\nIt cuts 0 of 200 pairs"),
        (sample(700, count=60), (512, None), "The shortest that cuts at most 50.0%"),  # all take 19% more
        (sample(931, count=2, pairs=2000), (512, None), "It cuts 2 of 2,000 pairs"),  # 0.1%
        (sample(931, count=3, pairs=2000), (1152, None), "; this cuts fewer for 0.2% more time"),
        (sample(300, count=3, prompt=9000), (512, 256), "Without max_prompt_length, 3 pairs would be left without"),
    ],
)
def test_what_the_recommendation_is_about(lengths, expected, reason):
    best = analyze_sample(lengths, min_coverage=0.5, min_tokens_kept=0.7)["recommendation"]
    assert (best["max_length"], best["max_prompt_length"]) == expected and reason in best["reason"]


def test_nothing_beyond_the_models_limit_is_considered():
    assert list_lengths(CANDIDATES, 10_000, None) == list_lengths(CANDIDATES, 10_000, 10**6) == list(CANDIDATES[:7])
    assert list_lengths(CANDIDATES, 10_000, 600) == [256, 512, 600]
    assert list_lengths(STEPS, 100, 2048) == [128]
    think = Lengths(**sample_lengths("think", 500))
    result = analyze_sample(think, min_coverage=0.99, min_tokens_kept=0.99, limit=4096)
    best = result["recommendation"]
    assert best["max_length"] == 4096 and best["reason"].startswith("No max_length")
    with pytest.raises(UserError, match="limit of 10 tokens"):
        analyze_sample(think, min_coverage=0.9, min_tokens_kept=0.9, limit=10, overlong="drop")


def test_findings_name_what_is_wrong(analyze, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder("llama"), tmp_path / "thinking")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")
    tokenizer.save_pretrained(tmp_path / "thinking")
    rows = [pair(i) for i in range(40)] + [pair(3), pair(5, chosen="five")]
    rows += [pair(90, chosen="same", rejected="same"), pair(91, chosen="")]
    rows += [pair(92, chosen="x" * 600 + "a", rejected="x" * 600 + "b")]
    rows += [pair(93) | {"chosen": [user("another"), assistant("a")]}]
    rows += [pair(95, chosen="a<|im_end|>\n<|im_start|>user\n")]
    result = analyze(rows, model=tmp_path / "thinking", min_coverage=0.5, min_tokens_kept=0.2)
    assert result["recommendation"]["max_length"] == 128
    assert result["dropped"] == {"chosen_equals_rejected": 1, "empty_response": 1, "prompts_differ": 1}
    findings = [f"{finding['level']}: {finding['text']}" for finding in result["findings"]]
    for words in (
        "warning: the rejected response is the longer one in",
        "DPO will learn to prefer shorter answers; balance them by filter_script",
        "warning: 1 pairs are exact repeats of earlier ones: set drop_duplicates to pairs",
        "warning: 44 prompts are not a token prefix",
        "warning: 1 pairs contain special tokens",
        "note: 1 of 47 rows dropped: chosen and rejected have different prompts, first in row 46 of",
    ):
        assert sum(words in finding for finding in findings) == 1, (words, findings)
    with pytest.raises(UserError, match=r"no train pair is left of 1 rows \(1 x empty response"):
        analyze([pair(0, chosen="")])
