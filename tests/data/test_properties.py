"""Random pairs: only a UserError is raised, no row is lost uncounted, what is trained decodes to the response."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from trl.trainer.dpo_trainer import DataCollatorForPreference

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.pairs import DROP_REASONS
from sfm_dpo.data.preferences import normalize_pair
from sfm_dpo.data.tokenization import tokenize_pairs
from tests.tiny_models import EOS, IM_END, IM_START, tiny_tokenizer
from tests.toolbox import read_pairs, write_jsonl

TOKENIZER = tiny_tokenizer()
PROFILE = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

# Unicode without surrogates (a JSON file with half of a pair is refused: test_bad_inputs.py), words that are special
# tokens or their pieces, JSON in text, and more than a max_length.
plain = st.text(max_size=12)
SPECIAL = [EOS, IM_END, IM_START, "<|im_", "end|>", "null", "42", '{"a": 1}', " ", "\n", "\x00", "ü" * 60]
special = st.sampled_from(SPECIAL)
texts = st.lists(plain | special, max_size=3).map("".join)
extras = st.dictionaries(st.sampled_from(["name", "functions", "weight"]), st.none() | st.integers(0, 9) | plain)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type", "x"]) | plain, inner, max_size=3)
    ),
    max_leaves=8,
)


@dataclass
class Case:
    """A row as it stands in the file, and what becomes of it: a reason, or the text of prompt, chosen, rejected."""

    row: dict[str, Any]
    expected: str | tuple[str, str, str]


def contents(text: str) -> st.SearchStrategy:
    """`text` as the content of a message: as it is, or None where it is empty."""
    return st.just(text) if text else st.sampled_from(["", None])


def render(role: str, text: str) -> str:
    """As tiny_models.CHAT_TEMPLATE has it."""
    return f"{IM_START}{role}\n{text}{IM_END}\n"


def predict_outcome(prompt: str, chosen: str, rejected: str, end: str) -> str | tuple[str, str, str]:
    if chosen == rejected:
        return "chosen_equals_rejected"
    if not chosen.strip() or not rejected.strip():
        return "empty_response"
    has_end = end == IM_END  # plain text may hold the EOS
    return prompt, *(t if has_end and t.rstrip().endswith(end) else t + end for t in (chosen, rejected))


@st.composite
def think(draw) -> Case:
    """Dolci-Think: the prompt is text, each side a list of one message."""
    prompt = draw(texts.filter(bool))
    chosen = draw(texts)
    rejected = draw(texts)
    # Equal texts under other extra keys would be another pair
    more = draw(extras)
    sides = {
        "chosen": [more | {"role": "assistant", "content": draw(contents(chosen))}],
        "rejected": [more | {"role": "assistant", "content": draw(contents(rejected))}],
    }
    start = render("user", prompt) + f"{IM_START}assistant\n"
    return Case({"prompt": prompt, **sides}, predict_outcome(start, chosen, rejected, f"{IM_END}\n"))


@st.composite
def instruct(draw) -> Case:
    """Dolci-Instruct: no prompt, two whole conversations with the same beginning, of one turn or several."""
    chosen = draw(texts)
    rejected = draw(texts)
    more = draw(extras)
    lead = []
    start = ""
    roles = ["system"] * draw(st.integers(0, 1)) + ["user", "assistant"] * draw(st.integers(0, 2)) + ["user"]
    for role in roles:
        text = draw(texts)
        lead.append(draw(extras) | {"role": role, "content": draw(contents(text))})
        start += render(role, text)
    ends = [more | {"role": "assistant", "content": draw(contents(text))} for text in (chosen, rejected)]
    row = {"chosen": [*lead, ends[0]], "rejected": [*lead, ends[1]], "source": draw(plain)}
    return Case(row, predict_outcome(f"{start}{IM_START}assistant\n", chosen, rejected, f"{IM_END}\n"))


@st.composite
def strings(draw) -> Case:
    prompt, chosen, rejected = (draw(texts) for _ in range(3))
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return Case(row, predict_outcome(prompt, chosen, rejected, IM_END))


case_files = st.lists(st.one_of(strings(), think(), instruct()), min_size=1, max_size=6)
sides = {"chosen": anything, "rejected": anything}
garbage = st.fixed_dictionaries(sides, optional={"prompt": anything, "x": anything})


@settings(max_examples=400, **PROFILE)
@given(*[anything | st.characters(categories=["Cs"])] * 3)
@example("q", [{"role": "assistant", "content": "\ud83d"}], [{"role": "assistant", "content": "b"}])
def test_any_json_is_a_pair_or_has_a_reason(prompt, chosen, rejected):
    pair = normalize_pair(prompt, chosen, rejected)
    if isinstance(pair, str):
        assert pair.partition(": ")[0] in DROP_REASONS
        return
    assert len(pair) == 3 and pair[1] != pair[2]
    assert all(isinstance(side, str) for side in pair) or all(
        isinstance(message["role"], str) and isinstance(message["content"], str) for side in pair for message in side
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("properties")


def load(folder, rows: list[dict]):
    return read_pairs(write_jsonl(folder / "pairs.jsonl", rows), "--max_dropped_fraction", 1)


@settings(max_examples=25, **PROFILE)
@given(rows=st.lists(garbage | think().map(lambda case: case.row), min_size=1, max_size=5), limit=st.integers(2, 99))
def test_garbage_is_counted_or_refused(folder, rows, limit):
    try:
        pairs = load(folder, rows)
    except UserError:
        return
    assert pairs.rows == len(rows) == len(pairs.train) + pairs.dropped.total()
    tokens, dropped = tokenize_pairs(pairs.train, TOKENIZER, limit)
    assert len(tokens) + len(dropped) == len(pairs.train)


@settings(max_examples=30, **PROFILE)
@given(cases=case_files, max_length=st.integers(2, 150), max_prompt_length=st.none() | st.integers(1, 40))
def test_no_row_is_lost_and_what_is_trained_is_the_response(folder, cases, max_length, max_prompt_length):
    reasons = Counter(case.expected for case in cases if isinstance(case.expected, str))
    expected = [case.expected for case in cases if isinstance(case.expected, tuple)]
    try:
        pairs = load(folder, [case.row for case in cases])
    except UserError as error:
        assert not expected and "no train pair is left" in str(error)
        return
    assert pairs.dropped == reasons and len(pairs.train) == len(expected)

    whole, _ = tokenize_pairs(pairs.train, TOKENIZER, None)
    assert len(whole) == len(expected)
    for row, (prompt, *responses) in zip(whole, expected, strict=True):
        for side, response in zip(read_sides(row, None), responses, strict=True):
            assert side.prompt + side.text == prompt + response
            # Where prompt and response meet in a special token, the prompt gives up its last tokens.
            assert side.text == response or (row["prompt_trimmed"] and side.text.endswith(response))

    tokens, dropped = tokenize_pairs(pairs.train, TOKENIZER, max_length, max_prompt_length)
    rooms = [max_length - min(row["prompt_length"], max_prompt_length or max_length) for row in whole]
    cuts = [
        [row[f"{side}_ids"][: max(room, 0)] for side in ("chosen", "rejected")]
        for row, room in zip(whole, rooms, strict=True)
    ]
    kept = [row for row, (chosen, rejected) in zip(whole, cuts, strict=True) if chosen != rejected]
    assert len(tokens) == len(kept) == len(whole) - len(dropped)
    for cut, full in zip(tokens, kept, strict=True):
        n = len(cut["prompt_ids"])
        assert n == min(full["prompt_length"], max_prompt_length or n) and full["prompt_ids"][-n:] == cut["prompt_ids"]
        for side, uncut in zip(read_sides(cut, max_length), read_sides(full, None), strict=True):
            assert side.ids and side.ids == uncut.ids[: max_length - n]  # with the EOS, where that fits


@dataclass
class Side:
    prompt: str
    ids: list[int]
    text: str


def read_sides(row: dict, max_length: int | None) -> tuple[Side, Side]:
    """What the loss sees of a pair, from the trainer's own collator: chosen and rejected."""
    batch = DataCollatorForPreference(pad_token_id=TOKENIZER.pad_token_id, max_length=max_length)([row])
    sides = []
    for ids, real, mask in zip(batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True):
        assert not mask[real == 0].any()
        prompt, response = (ids[(real == 1) & (mask == side)].tolist() for side in (0, 1))
        sides.append(Side(TOKENIZER.decode(prompt), response, TOKENIZER.decode(response)))
    return sides[0], sides[1]
