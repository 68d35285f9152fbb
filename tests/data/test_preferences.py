"""Preference pairs: every published shape and drop reason, no row lost uncounted, each broken file in one line."""

import gzip
import json
import re
from datetime import date

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, concatenate_datasets
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common.errors import DiskFull, UserError
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.pairs import DROP_REASONS
from sfm_dpo.data.preferences import load_pairs, normalize_pair, read_transcript
from sfm_dpo.data.sources import load_rows
from sfm_dpo.data.tokenization import load_token_pairs
from sfm_dpo.train import reference_cache
from tests.commands import ROOT
from tests.tiny_models import tiny_tokenizer
from tests.toolbox import assistant, config_of, small_disk, user
from tests.toolbox import read_pairs as load

PAIR = {"prompt": "q", "chosen": [assistant("good")], "rejected": [assistant("bad")]}
S = {"role": "system", "content": "s"}
Q = user("q")
A = assistant("a")
B = assistant("b")
PLAIN = ([Q], [A], [B])
WITH_SYSTEM = ([S, Q], [A], [B])
CALL = assistant("", tool_calls=[{"name": "f"}])
RESULT = {"role": "tool", "content": "7"}
HUMAN = "\n\nHuman: q\n\nAssistant: "
JSON_ANSWERS = ('[{"role": "user", "content": "x"}, 3]', "[{'role': 'user', 'content': 'x'}] is what you pass.")
LOOK = {"city": "Köln", "at": None}


def message(role: str, text: str) -> dict:
    return {"role": role, "content": text}


def two_calls(look) -> dict:
    add = {"name": "add", "arguments": {"x": 1, "city": None, "y": [None, {"z": None}]}}
    calls = [{"id": None, "function": add}, {"id": "1", "function": {"name": "look", "arguments": look}}]
    return assistant("", tool_calls=calls)


ADDS = two_calls(json.dumps(LOOK))
ADDED = two_calls(LOOK)
THOUGHT = assistant("a", thinking="t", reasoning_content="r")


def mixture(tmp_path, entries, *cli):
    (tmp_path / "r.yaml").write_text(json.dumps({"datasets": entries}))
    return parse_config(["--config", str(tmp_path / "r.yaml"), "--model_name_or_path", "m", "--use_cpu", *cli])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("q", [A], [B]), PLAIN),  # Dolci-Think: prompt text, responses as message lists
        (([S, Q], [A], [B]), WITH_SYSTEM),  # prompt as messages
        ((None, [Q, A], [Q, B]), PLAIN),  # Dolci-Instruct: whole conversations
        # several turns: all that both sides share is the prompt
        ((None, [S, Q, B, Q, A], [S, Q, B, Q, B]), ([S, Q, B, Q], [A], [B])),
        (("q", [Q, A], [Q, B]), PLAIN),  # UltraFeedback: whole conversations and a prompt column with their question
        (([S, Q], [Q, A], [Q, B]), WITH_SYSTEM),
        # in another spelling, with more keys, with or without a system message or the first turns
        (([Q, B, Q], [S, Q, B, Q, A], [S, Q, B, Q, B]), ([S, Q, B, Q], [A], [B])),
        (([S, user("q ")], [Q, A], [Q, B]), WITH_SYSTEM),
        (([S, user(" q")], [Q, B, Q, A], [Q, B, Q, B]), ([S, Q, B, Q], [A], [B])),
        (([S, Q, B, user("q ")], [Q, A], [Q, B]), ([S, Q, B, Q], [A], [B])),
        (([user("p"), B | {"n": ""}, Q], [user("p"), B, Q, A], [user("p"), B, Q, B]), ([user("p"), B, Q], [A], [B])),
        (([Q, A], [Q, A], [Q, B]), ([Q, A], [A], [B])),  # a prompt with an answer, which tokenization drops
        (([S], [Q, A], [Q, B]), WITH_SYSTEM),  # a prompt column with the system message alone must not get lost
        (([Q], "a", "b"), PLAIN),  # responses as text under a prompt of messages
        (([{"from": "human", "value": "q"}], {"from": "gpt", "value": "a"}, [B]), PLAIN),  # ShareGPT
        # hh-rlhf, with a prompt column
        ((HUMAN, f"{HUMAN}a", f"{HUMAN}b"), PLAIN),
        # plain text
        (("q: ", "a", "b"), ("q: ", "a", "b")),
        (("q", [A], [assistant("b", name=None)]), PLAIN),  # keys that are None
        (("q", [CALL | {"content": None}], [B]), ([Q], [CALL], [B])),
        (("q", [assistant([{"type": "text", "text": "a", "image": None}])], [B]), PLAIN),
        (("q", [assistant("", tool_calls='[{"name": "f"}]')], [B]), ([Q], [CALL], [B])),
        (("q", [ADDS], [B]), ([Q], [ADDED], [B])),
        (("q", [ADDS | {"tool_calls": json.dumps(ADDS["tool_calls"])}], [B]), ([Q], [ADDED], [B])),
        (("q", [THOUGHT], [B]), ([Q], [THOUGHT], [B])),
        (("q", [CALL, RESULT, A], [B]), ([Q], [CALL, RESULT, A], [B])),  # a response of several turns
        (("q", json.dumps([Q, A]), json.dumps([Q, B])), PLAIN),  # lists as JSON text
        ((None, json.dumps([Q, A], indent=1), [Q, B]), PLAIN),
        ((json.dumps([S, Q]), "a", json.dumps({"from": "gpt", "value": "b"})), WITH_SYSTEM),
        (("q", json.dumps([{"role": "assistant", "tool_calls": [{"name": "f"}]}]), "b"), ([Q], [CALL], [B])),
        (("q", *JSON_ANSWERS), ("q", *JSON_ANSWERS)),  # answers that happen to be JSON
        # roles of another spelling
        ((None, [message("Human", "q"), message("Assistant:", "a")], [Q, message("bot", "b")]), PLAIN),
        ((None, [message("USER", "q"), A], [Q, B]), PLAIN),
        ((None, [message("System", "s"), message("prompter", "q"), A], [S, Q, message("model", "b")]), WITH_SYSTEM),
    ],
)
def test_shapes(row, expected):
    assert normalize_pair(*row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("q", 5, 6), "malformed"),
        (("q", [assistant([{"type": "image", "image": "x"}])], [B]), "malformed"),
        (("q", [assistant(3)], [B]), "malformed"),
        ((None, [A], [B]), "no_prompt"),
        (("q", [user("a")], [B]), "last_turn_not_assistant: its role is 'user'"),
        ((None, [Q, A, Q], [Q, B]), "last_turn_not_assistant: its role is 'user'"),
        (("q", [A], [message("Expert", "b")]), "last_turn_not_assistant: its role is 'Expert'"),
        ((None, [Q, A], [user("p"), B]), "prompts_differ: in a turn of the role 'user'"),
        ((None, "same", "other"), "no_prompt"),
        ((None, "same", [B]), "no_prompt"),
        (("q", [], [B]), "empty_response"),
        (("q", [assistant("  \n")], [B]), "empty_response"),
        (("q", "a", " "), "empty_response"),
        (("q", [A], [A]), "chosen_equals_rejected"),
        (("q", "a", "a"), "chosen_equals_rejected"),
    ],
)
def test_drop_reasons(row, reason):
    assert normalize_pair(*row) == reason and reason.partition(": ")[0] in DROP_REASONS


SINGLE = {"chosen": [A], "rejected": [B]}


@pytest.mark.parametrize(
    ("columns", "prompt"),
    [
        ({"conversations": [{"from": "human", "value": "q"}], "context": ""}, [Q]),
        ({"messages": [S, Q]}, [S, Q]),
        ({"messages": json.dumps([Q]), "system": "s"}, [S, Q]),
        ({"question": "q", "prompt": None}, [Q]),
        ({"question": "q", "prompt": "", "chosen": "a", "rejected": "b"}, [Q]),
        ({"instruction": "q", "input": "i", "chosen": "a", "rejected": "b"}, [user("q\ni")]),
        ({"query": "\n\nHuman: q\n\nAssistant:"}, [Q]),
    ],
)
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_a_prompt_in_another_column(write_rows, columns, prompt, name):
    pairs = load(write_rows(name, [SINGLE | columns])).train
    assert [pairs[0][part] for part in ("prompt", "chosen", "rejected")] == [prompt, [A], [B]]
    assert not pairs[0]["ignored"]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"context": "c", "question": "q"}, "question and context look like it; rename one of them to prompt"),
        ({"messages": [Q, A]}, "messages holds an answer or ends with the role 'assistant'; end it"),
        ({"messages": [Q, A, Q]}, "messages holds an answer or"),
        ({"conversations": [{"from": "Ann", "value": "q"}]}, "conversations holds .* the role 'Ann'; end it with"),
    ],
)
def test_a_prompt_in_no_column_names_those_that_look_like_one(write_rows, columns, reason):
    with pytest.raises(UserError, match=rf"\(1 x no prompt: .* in the column prompt, first in row 1 of .*: {reason}"):
        load(write_rows("pairs.jsonl", [SINGLE | columns]))


@pytest.mark.parametrize(
    ("columns", "template"),
    [
        ({"tools": "[]", "chat_template_kwargs": "{}"}, None),  # a template may print tools that are there, if none
        ({"tools": "null", "chat_template_kwargs": '{"enable_thinking": false}'}, '{"enable_thinking": false}'),
    ],
)
def test_arguments_of_the_template_as_json_text(write_rows, columns, template):
    assert load(write_rows("pairs.jsonl", [PAIR | columns])).train["template"][:] == [template]


def test_whole_conversations_hide_other_columns(write_rows):
    rows = [{"chosen": [Q, A], "rejected": [Q, B], "messages": [user("p")], "system": "x"}]
    pairs = load(write_rows("pairs.jsonl", rows)).train
    assert pairs[0]["prompt"] == [Q] and pairs[0]["ignored"] == "system"


def test_messages_as_python_prints_them_are_refused(write_rows):
    arrays = "[{'content': 'q', 'role': 'user'}\n {'content': \"it's\", 'role': 'assistant'}]"  # of NumPy
    for chosen in (str([Q, A]), arrays):
        with pytest.raises(UserError, match=r"malformed.*: messages as Python prints them are not JSON; .*json.dumps"):
            load(write_rows("pairs.jsonl", [PAIR | {"chosen": chosen}]))


def test_what_a_file_holds_arrives_unchanged(write_rows):
    calls = [{"function": {"name": "f", "arguments": {"x": 1, "y": [1.5, None, "ü"]}}}]
    text = "😀\u2028\x00 ü\r\n<|im_end|>"
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b", "score": 1.5},
        {"prompt": text, "chosen": [assistant(text, tool_calls=calls)], "rejected": [assistant("b", weight=2)]},
        {"chosen": [Q, A], "rejected": [Q, B], "dropped": "y", "source": 3},
    ]
    pairs = load(write_rows("mixed.jsonl", rows))
    assert pairs.rows == 3 and not pairs.dropped
    assert {"template", "source", "row", "prompt_key", "pair_key"} < set(pairs.train.column_names)
    assert pairs.train["prompt"][:] == ["q", [user(text)], [user("q")]]
    assert pairs.train[1]["chosen"] == [assistant(text, tool_calls=calls)]
    assert pairs.train[1]["rejected"] == [assistant("b", weight=2)]


JSON_LIKE = ["42", "true", "null", "[1, 2]", '{"answer": 42}', "1e5", '"Yes, quoted."', "2024-01-31", "plain"]
NEIGHBOURS = [  # in which a reader that infers types finds other ones
    {"prompt": [Q], "chosen": [Q, A], "rejected": [Q, B]},
    PAIR | {"chosen": "x"},
    PAIR | {"chosen": [assistant("x", weight=2)]},
    PAIR | {"chosen": [assistant("x" * 11 * 2**20)]},  # further than such a reader looks
    PAIR | {"chosen": 4},
    PAIR | {"chosen": [assistant([{"type": "text", "text": "x"}])]},
]


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_only_nulls_that_arrow_adds_are_left_out(write_rows, name):
    """In a Parquet file every struct of a column has the keys of all others; in JSON a null is the row's own."""
    calls = [{"name": "add", "arguments": {"x": 1, "unit": None}}, {"name": "look", "arguments": {"city": "Köln"}}]
    rows = [PAIR | {"chosen": [assistant("", tool_calls=[call], name=None)], "tools": [call]} for call in calls]
    pairs = load(write_rows(name, rows)).train
    if name == "pairs.parquet":
        del calls[0]["arguments"]["unit"]
    assert pairs["chosen"][:] == [[assistant("", tool_calls=[call])] for call in calls]
    assert [json.loads(template)["tools"] for template in pairs["template"]] == [[call] for call in calls]


@pytest.mark.parametrize("name", ["pairs.json", "pairs.jsonl"])
def test_text_stays_text_whatever_its_neighbours_are(write_rows, name):
    rows = [{"prompt": text, "chosen": text, "rejected": "no"} for text in JSON_LIKE]
    rows += [PAIR | {"prompt": text, "chosen": [assistant(text)]} for text in JSON_LIKE]
    pairs = load(write_rows(name, rows + NEIGHBOURS), "--max_dropped_fraction", "1")
    assert pairs.dropped == {"malformed": 1}
    assert pairs.train["chosen"][: len(rows)] == [*JSON_LIKE, *([assistant(text)] for text in JSON_LIKE)]


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_rows_of_a_folder_have_a_cache_of_their_own(write_rows, tmp_path, first):
    """The same folder read by `datasets` itself: it takes text for values, and must not meet our rows either."""
    texts = [{"prompt": text, "chosen": "a", "rejected": "b"} for text in JSON_LIKE]
    write_rows("d/train.jsonl", texts + NEIGHBOURS[:1])
    for reader in ("ours", "theirs") if first == "ours" else ("theirs", "ours"):
        if reader == "ours":
            assert load(tmp_path / "d").train["prompt"][:] == [*JSON_LIKE, [Q]]
        else:
            rows = datasets.load_dataset(str(tmp_path / "d"), split="train")
            assert rows.column_names == ["prompt", "chosen", "rejected"]


def test_other_columns_are_not_decoded_and_bytes_are_malformed(tmp_path):
    row = {"prompt": "q", "chosen": [A | {"at": date(2024, 1, 2)}], "rejected": [B], "tools": [{"raw": None}]}
    rows = Dataset.from_list([row, row | {"tools": [{"raw": b"c"}]}])
    image = Dataset.from_dict({"image": [{"bytes": b"no image"}] * 2}, features=Features({"image": Image()}))
    concatenate_datasets([rows, image], axis=1).to_parquet(tmp_path / "pairs.parquet")
    pairs = load(tmp_path / "pairs.parquet", "--max_dropped_fraction", 1)
    assert pairs.dropped == {"malformed": 1}
    assert pairs.train[0]["prompt"] == [Q] and pairs.train[0]["chosen"] == [assistant("a", at="2024-01-02")]


def test_calls_that_are_not_json_are_counted(write_rows):
    wrong = ("add(2)", [{"function": {"name": "add", "arguments": "x=2"}}])
    rows = [PAIR, *(PAIR | {"chosen": [assistant("", tool_calls=calls)]} for calls in wrong)]
    assert load(write_rows("calls.jsonl", rows), "--max_dropped_fraction", 1).dropped == {"malformed": 2}


EMPTY = PAIR | {"chosen": [assistant("")]}
DIFFER = {"chosen": [Q, A], "rejected": [user("p"), B]}


def test_dropped_rows_are_listed_by_the_number_in_their_own_file(write_rows, tmp_path):
    """Two sources, shuffled before the tokens are looked at."""
    first = write_rows("first.jsonl", [PAIR, EMPTY, *numbered(8), DIFFER])
    long = PAIR | {"prompt": "word " * 200}
    second = write_rows("second.parquet", [*numbered(3), PAIR | {"rejected": PAIR["chosen"]}, long, *numbered(5)])
    cli = ["--max_dropped_fraction", "1", "--max_length", "64", "--eval_fraction", "0.2"]
    config = mixture(tmp_path, [{"path": str(first)}, {"path": str(second)}], *cli)
    pairs = load_token_pairs(config, tiny_tokenizer())
    pairs.write_dropped(tmp_path / "dropped.jsonl")
    expected = [
        (str(first), 2, "empty_response"),
        (str(first), 11, "prompts_differ"),
        (str(second), 4, "chosen_equals_rejected"),
        (str(second), 5, "prompt_too_long"),
    ]
    lines = map(json.loads, (tmp_path / "dropped.jsonl").read_text().splitlines())
    assert [(line["source"], line["row"], line["reason"]) for line in lines] == expected
    assert f"first in row 11 of {first}" in pairs.table() and f"first in row 5 of {second}" in pairs.table()
    kept = [row for split in pairs.splits.values() for row in zip(split["source"], split["row"], strict=True)]
    numbers = {(str(first), i) for i in range(1, 12)} | {(str(second), i) for i in range(1, 11)}
    assert sorted(kept) == sorted(numbers - {row[:2] for row in expected})


def test_max_dropped_fraction(write_rows):
    path = write_rows("bad.jsonl", [PAIR] * 19 + [EMPTY])
    assert len(load(path).train) == 19  # exactly the default of 5%
    with pytest.raises(UserError, match=r"1 of 20 rows .*empty response.*max_dropped_fraction 0\.04"):
        load(path, "--max_dropped_fraction", "0.04")
    reason = r"no train pair is left of 3 rows \(3 x chosen and rejected have different prompts, first in row 1 of"
    with pytest.raises(UserError, match=reason):
        load(write_rows("all.jsonl", [DIFFER] * 3), "--max_dropped_fraction", "1")


def numbered(n, side="q"):
    return [{"prompt": f"{side}{i}", "chosen": [assistant("a")], "rejected": [assistant("b")]} for i in range(n)]


def prompts(pairs):
    return [row["prompt"][0]["content"] for row in pairs]


def test_max_samples_and_held_out_split_are_seeded_and_disjoint(write_rows):
    path = write_rows("many.jsonl", numbered(50))

    def run(*cli):
        return [prompts(split) for split in load(path, *cli).splits.values()]

    drawn = run("--max_samples", "20", "--eval_fraction", "0.2")
    assert list(map(len, drawn)) == [16, 4] and len({*drawn[0], *drawn[1]}) == 20
    assert drawn == run("--max_samples", "20", "--eval_fraction", "0.2")
    assert drawn != run("--max_samples", "20", "--eval_fraction", "0.2", "--seed", "1")
    assert len(run("--max_samples", "999")[0]) == 50
    with pytest.raises(UserError, match=r"eval_fraction 0\.001: 0 of 50 pairs would be held out"):
        run("--eval_fraction", "0.001")


def test_a_prompt_is_trained_or_held_out_but_not_both(write_rows, tiny_folder):
    rows = [row | {"chosen": f"{i}"} for i in range(5) for row in numbered(20) * (i % 2 + 1)]
    path = write_rows("repeated.jsonl", rows)
    config = config_of(path, tiny_folder("llama"), "--eval_fraction", 0.2)
    texts = load_pairs(config)
    trained, held_out = (set(prompts(split)) for split in texts.splits.values())
    assert not trained & held_out and len(trained | held_out) == 20
    assert [len(split) for split in texts.splits.values()] == [112, 28]
    table = load_token_pairs(config, tiny_tokenizer()).table()
    assert re.search(r"pairs held out: eval +28$", table)
    with pytest.raises(UserError, match=r"0\.5: 7 of 7 pairs would be held out, of 1 prompts"):
        load(write_rows("one.jsonl", [row for row in rows if row["prompt"] == "q0"]), "--eval_fraction", "0.5")


def test_max_dropped_fraction_of_a_sample(write_rows, tiny_folder):
    """Most rows are not looked at, so they do not count as good."""
    rows = [*numbered(150), *({**row, "prompt": "word " * 200} for row in numbered(50))]
    argv = (write_rows("long.jsonl", [*rows, EMPTY]), tiny_folder("llama"), "--max_length", 64, "--max_samples", 20)

    def read(*more):
        return load_token_pairs(config_of(*argv, *more), tiny_tokenizer())

    with pytest.raises(UserError, match=r": [1-9] of 20 rows cannot be used \([1-9] x prompt leaves no room"):
        read()
    pairs = read("--max_dropped_fraction", "0.9")
    assert re.search(r"not drawn \(max_samples, fraction\) +180\n", pairs.table())
    assert "drawn" not in read("--max_samples", 999, "--max_dropped_fraction", "0.9").table()


def test_mixture_with_fractions(write_rows, tmp_path):
    a = write_rows("a.jsonl", numbered(30, "a"))
    b = write_rows("b.parquet", numbered(40, "b"))

    def run(*fractions):
        entries = [{"path": str(p), "fraction": f} for p, f in zip((a, b), fractions, strict=True)]
        pairs = load_pairs(mixture(tmp_path, entries))
        mixed = prompts(pairs.train)
        assert len(set(mixed)) == len(mixed)  # nothing twice
        assert pairs.rows == 70 and pairs.sources == [str(a), str(b)]
        return sum(p[0] == "a" for p in mixed), sum(p[0] == "b" for p in mixed)

    assert run(None, None) == (30, 40)
    assert run(0.5, 0.5) == (30, 30)
    assert run(0.1, 0.9) == (4, 40)


def test_a_folder_with_several_splits_gives_the_one_that_is_asked_for(write_rows, tmp_path):
    write_rows("copy/data/train-00000.parquet", [PAIR] * 3)
    write_rows("copy/data/test-00000.parquet", [PAIR] * 2)
    (tmp_path / "copy" / "README.md").write_text("# A dataset")
    assert len(load_rows(DatasetConfig(str(tmp_path / "copy")))) == 3
    assert len(load_rows(DatasetConfig(str(tmp_path / "copy"), split="test"))) == 2
    with pytest.raises(UserError, match="validation"):
        load_rows(DatasetConfig(str(tmp_path / "copy"), split="validation"))
    with pytest.raises(UserError, match="has no x; remove it"):
        load_rows(DatasetConfig(str(tmp_path / "copy"), data_files="x"))
    file = write_rows("rows.jsonl", [PAIR] * 4)
    assert len(load_rows(DatasetConfig(str(file), split="train[:50%]"))) == 2
    with pytest.raises(UserError, match="test"):
        load_rows(DatasetConfig(str(file), split="test"))


@pytest.mark.parametrize(
    ("names", "unused"),
    [
        (["math.jsonl", "train_code.jsonl"], "math.jsonl"),
        (["a.jsonl", "b.jsonl", "c_test.jsonl"], "a.jsonl"),
        (["data/train-00000-of-00001.parquet", "more.parquet"], "more.parquet"),
        (["a.jsonl", "__b/b.jsonl"], "b.jsonl"),
    ],
)
def test_no_file_of_a_folder_is_left_out_in_silence(write_rows, tmp_path, names, unused):
    for name in names:
        write_rows(f"d/{name}", numbered(2))
    with pytest.raises(UserError, match=rf"/{unused}: is in none of the splits .* tell \((train|test)\); rename"):
        load(tmp_path / "d")


def test_the_readme_of_a_copy_chooses_its_files(write_rows, tmp_path):
    write_rows("copy/first/train.jsonl", numbered(3))
    write_rows("copy/second.jsonl", numbered(2))
    write_rows("copy/dataset_info.json", [{}])
    write_rows("copy/export/train.parquet", numbered(4))
    configs = "[{config_name: a, default: true, data_files: first/*}, {config_name: b, data_files: second.jsonl}]"
    columns = "{config_name: a, features: [{name: prompt, dtype: string}]}"  # as the Hub's viewer shows them
    (tmp_path / "copy" / "README.md").write_text(f"---\nconfigs: {configs}\ndataset_info: {columns}\n---\n# Pairs\n")
    assert len(load(tmp_path / "copy").train) == 3
    assert len(load(tmp_path / "copy", "--dataset_config", "b").train) == 2


def test_a_folder_of_save_to_disk_and_of_several_configurations(write_rows, tmp_path):
    rows = [Dataset.from_list(numbered(n, f"s{n}")) for n in (3, 2)]
    for name, part in zip(("saved/a", "saved/b"), rows, strict=True):
        part.save_to_disk(tmp_path / name)
    datasets.DatasetDict(train=rows[0], test=rows[1]).save_to_disk(tmp_path / "splits")
    assert prompts(load(tmp_path / "saved/a").train) == ["s30", "s31", "s32"]
    assert prompts(load(tmp_path / "saved", "--dataset_config", "b").train) == ["s20", "s21"]
    assert prompts(load(tmp_path / "splits", "--dataset_train_split", "test").train) == ["s20", "s21"]
    with pytest.raises(UserError, match=r"a: cannot be read: KeyError: 'test'; .* has a split test"):
        load(tmp_path / "saved/a", "--dataset_train_split", "test")
    for name in ("a/train.jsonl", "b/train.jsonl"):
        write_rows(f"d/{name}", numbered(2, name[0]))
    for folder in ("d", "saved"):
        with pytest.raises(UserError, match=rf"{folder}: its rows are in several folders \(a, b\); set dataset_conf"):
            load(tmp_path / folder)
    assert prompts(load(tmp_path / "d", "--dataset_config", "b").train) == ["b0", "b1"]
    with pytest.raises(UserError, match="dataset_config law: is neither in the README"):
        load(tmp_path / "d", "--dataset_config", "law")


def test_a_folder_is_the_sum_of_its_files_but_not_of_hidden_ones(write_rows, tmp_path):
    for name, n in (("a.jsonl", 2), ("sub ü/b.jsonl", 3), (".cache/c.parquet", 4)):
        write_rows(f"d/{name}", numbered(n, name[-7]))
    (tmp_path / "d" / "README.md").write_text("notes")
    assert sorted(prompts(load(tmp_path / "d").train)) == ["a0", "a1", "b0", "b1", "b2"]


def test_files_may_be_compressed(write_rows, tmp_path):
    for name in ("d/train.jsonl", "d/test.jsonl"):
        file = write_rows(name, numbered(2, name[2:4]))
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert prompts(load(tmp_path / "d").train) == prompts(load(tmp_path / "d/train.jsonl.gz").train) == ["tr0", "tr1"]


@pytest.mark.parametrize("name", ["pairs[1].jsonl", "what?.parquet", "run[12]/a*.jsonl"])
def test_a_name_is_not_a_pattern(write_rows, tmp_path, monkeypatch, name):
    for file in ("pairs1.jsonl", "whatx.parquet", "run1/ax.jsonl"):
        write_rows(file, numbered(2, "other"))
    write_rows(name, numbered(3))
    monkeypatch.chdir(tmp_path)
    assert prompts(load(name).train) == ["q0", "q1", "q2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"\n \n", "empty.jsonl: cannot be read: .* no data!; check"),
        ("null.jsonl", b"null\n", "null.jsonl: line 1: not a JSON object"),
        ("bad.jsonl", b'{"chosen": "a", "rejected": "b"}\n\n{"chosen": \n', "bad.jsonl: line 3: Expecting value"),
        ("bad.json", b'[{"chosen": "a"},\n{"chosen": }]', "bad.json: Expecting value: line 2"),
        ("latin1.jsonl", b'{"chosen": "a\xe9", "rejected": "b"}\n', "latin1.jsonl: line 1: 'utf-8' codec"),
        ("bad.parquet", b"PAR?", "bad.parquet: cannot be read"),
        ("pairs.csv", b"chosen,rejected\na,b\n", "pairs.csv: give .json, .jsonl or .parquet files"),
        ("one.jsonl", b'{"prompt": "q", "chosen": "a"}\n', "no column rejected; it has prompt, chosen"),
        ("ask.jsonl", b'{"ask": "q", "chosen": "a", "rejected": "b"}\n', "no prompt: answers alone need one in"),
        ("number.jsonl", b'{"chosen": 1, "rejected": [{"from": "gpt"}]}\n', r"malformed: no text, messages \(role"),
    ],
)
def test_broken_files_are_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_missing_empty_and_mixed_folders_and_no_network(write_rows, tmp_path):
    for path in ("nowhere.jsonl", "./nowhere", "/nowhere/at/all", "a/b/c"):
        with pytest.raises(UserError, match="no such file or folder"):
            load(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="one format; found none"):
        load(tmp_path / "empty")
    write_rows("two/a.jsonl", [PAIR])
    write_rows("two/b.parquet", [PAIR])
    with pytest.raises(UserError, match=r"found \.jsonl, \.parquet"):
        load(tmp_path / "two")
    with pytest.raises(UserError, match=r"dataset_name org/pairs: not a local file, .*prefetch"):
        load("org/pairs")


def test_a_full_disk_while_pairs_are_read_and_in_the_reference_pass(write_rows, tmp_path, monkeypatch):
    """On a file system that is really full: needs root, and the right to mount."""
    path = write_rows("pairs.jsonl", [{"prompt": f"{i} " + "q" * 1000} for i in range(600)])
    with small_disk(tmp_path / "hf", "64k") as home:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home / "datasets")
        with pytest.raises(UserError, match=f"HF_HOME: {home}/datasets.*: No space left on device"):
            load_rows(DatasetConfig(str(path)))
        cache = reference_cache.ReferenceCache(home / "key", np.arange(1, 65), 1, 8)
        reference_cache.make_cache_folder(cache.folder)
        with pytest.raises(DiskFull, match=f"HF_HOME: {home}/key.*: No space left on device"):
            score = lambda rows: torch.zeros(len(rows), 2)  # noqa: E731
            reference_cache.cached_logps("train", cache, score, lambda done, total, owner: None)
        assert not list(cache.folder.glob("lease*")), "the others wait for nothing"


def last_texts(pairs: Dataset) -> list[tuple]:
    return [tuple(row[side][-1]["content"] for side in ("prompt", "chosen", "rejected")) for row in pairs]


def test_the_script_of_the_docs_pairs_the_best_answer_with_the_worst(write_rows, tmp_path, monkeypatch):
    rows = []
    for number, scores in enumerate([[5.0, 8.5, 2.0], [3.0, 3.0], [1.0, 2.0], []]):
        answers = [{"response": f"a{n}", "overall_score": score} for n, score in enumerate(scores)]
        rows.append({"source": "evol", "instruction": f"q{number}", "completions": answers})
    write_rows("openbmb/UltraFeedback/train.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    scored = (ROOT / "docs/data.md").read_text().split("### Scored answers")[1]
    exec(re.search(r"```python\n(.*?)```", scored, re.S)[1], {})
    assert last_texts(load(tmp_path / "pairs.jsonl").train) == [("q0", "a1", "a2"), ("q2", "a1", "a0")]


def test_transcripts(write_rows):
    text = "\n\nHuman: Hi\n\nwell\n\nAssistant: Hello\n\nHuman: Bye\n\nAssistant:"
    assert read_transcript(text) == [user("Hi\n\nwell"), assistant("Hello"), user("Bye")]
    assert read_transcript("Human: Hi") == "Human: Hi" and read_transcript([]) == []
    pairs = load(write_rows("pairs.jsonl", [{"chosen": text + " good", "rejected": text + " bad"}])).train
    assert last_texts(pairs) == [("Bye", "good", "bad")]
