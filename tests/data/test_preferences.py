"""Preference pairs: every published shape and drop reason, no row lost uncounted, each broken file in one line."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.preferences import DROP_REASONS, load_pairs, normalize_pair
from sfm_dpo.data.sources import load_rows
from sfm_dpo.data.tokenization import load_token_pairs
from tests.tiny_models import tiny_tokenizer


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **extra):
    return {"role": "assistant", "content": text, **extra}


def system(text):
    return {"role": "system", "content": text}


PAIR = {"prompt": "q", "chosen": [assistant("good")], "rejected": [assistant("bad")]}
S, Q, A, B = system("s"), user("q"), assistant("a"), assistant("b")
PLAIN = ([Q], [A], [B])
WITH_SYSTEM = ([S, Q], [A], [B])
CALL, RESULT = assistant("", tool_calls=[{"name": "f"}]), {"role": "tool", "content": "7"}


def config(dataset=None, *cli, recipe=None):
    data = [] if dataset is None else ["--dataset_name", str(dataset)]
    recipe = [] if recipe is None else ["--config", str(recipe)]
    return parse_config([*recipe, "--model_name_or_path", "org/model", "--use_cpu", *data, *cli])


def load(dataset, *cli):
    return load_pairs(config(dataset, *cli))


# ---- shapes


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("q", [A], [B]), PLAIN),  # Dolci-Think: prompt text, responses as message lists
        (([S, Q], [A], [B]), WITH_SYSTEM),  # prompt as messages
        ((None, [Q, A], [Q, B]), PLAIN),  # Dolci-Instruct: whole conversations
        # several turns: all that both sides share is the prompt
        ((None, [S, Q, B, Q, A], [S, Q, B, Q, B]), ([S, Q, B, Q], [A], [B])),
        (("q", [Q, A], [Q, B]), PLAIN),  # UltraFeedback: whole conversations and a prompt column with their question
        (("q", [S, Q, A], [S, Q, B]), WITH_SYSTEM),
        (([S, Q], [Q, A], [Q, B]), WITH_SYSTEM),
        (([S], [Q, A], [Q, B]), WITH_SYSTEM),  # a prompt column with the system message alone must not get lost
        (([Q], "a", "b"), PLAIN),  # responses as text under a prompt of messages
        # plain text
        (("q: ", "a", "b"), ("q: ", "a", "b")),
        (("", "a", "b"), ("", "a", "b")),
        ((None, "the sky is blue", "the sky is green"), ("the sky is", " blue", " green")),
        ((None, "line one\nyes", "line one\nno"), ("line one\n", "yes", "no")),
        ((None, "a b", "a b c d"), ("a", " b", " b c d")),
        # content as parts, content None beside a tool call, keys that are None
        (
            ("q", [assistant([{"type": "text", "text": "a"}, "b"])], [assistant("b", name=None)]),
            ([Q], [assistant("ab")], [B]),
        ),
        (("q", [CALL | {"content": None}], [B]), ([Q], [CALL], [B])),
        (("q", [CALL, RESULT, A], [B]), ([Q], [CALL, RESULT, A], [B])),  # a response of several turns
    ],
)
def test_shapes(row, expected):
    assert normalize_pair(*row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("q", 5, 6), "malformed"),
        (("q", None, None), "malformed"),
        (("q", [{"from": "gpt", "value": "a"}], [{"from": "gpt", "value": "b"}]), "malformed"),
        (("q", [assistant([{"type": "image"}])], [B]), "malformed"),
        (("q", [assistant([{"type": "text", "text": 5}])], [B]), "malformed"),
        (("q", [assistant(3)], [B]), "malformed"),
        (({"text": "q"}, [A], [B]), "malformed"),
        ((None, [A], [B]), "malformed"),  # no prompt anywhere
        (("q", [user("a")], [B]), "last_turn_not_assistant"),
        ((None, [Q, A, Q], [Q, B]), "last_turn_not_assistant"),
        ((None, [Q, A], [user("p"), B]), "prompts_differ"),
        ((None, "same", "other"), "prompts_differ"),
        (("q", [], [B]), "empty_response"),
        (("q", [assistant("  \n")], [B]), "empty_response"),
        (("q", [A], [assistant(None)]), "empty_response"),
        (("q", [A], [assistant("", id="x")]), "empty_response"),
        (("q", "a", " "), "empty_response"),
        (("q", [A], [A]), "chosen_equals_rejected"),
        (("q", "a", "a"), "chosen_equals_rejected"),
    ],
)
def test_drop_reasons(row, reason):
    assert normalize_pair(*row) == reason and reason in DROP_REASONS


def test_what_a_file_holds_arrives_unchanged(write_rows):
    calls = [{"function": {"name": "f", "arguments": {"x": 1, "y": [1.5, None, "ü"]}}}]
    text = "😀\u2028\x00 ü\r\n<|im_end|>"
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b", "score": 1.5},
        {"prompt": text, "chosen": [assistant(text, tool_calls=calls)], "rejected": [assistant("b", weight=2)]},
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")], "dropped": "y", "source": 3},
    ]
    pairs = load(write_rows("mixed.jsonl", rows))
    assert pairs.rows == 3 and not pairs.dropped
    assert {"template", "source", "row", "prompt_key", "pair_key"} < set(pairs.train.column_names)
    assert pairs.train["prompt"][:] == ["q", [user(text)], [user("q")]]
    assert pairs.train[1]["chosen"] == [assistant(text, tool_calls=calls)]
    assert pairs.train[1]["rejected"] == [assistant("b", weight=2)]


JSON_LIKE = ["42", "true", "null", "[1, 2]", '{"answer": 42}', "1e5", '"Yes, quoted."', "2024-01-31", "plain"]
NEIGHBOURS = {
    "parts": {"prompt": "q", "chosen": [assistant([{"type": "text", "text": "x"}])], "rejected": [assistant("y")]},
    "text": {"prompt": "q", "chosen": "x", "rejected": [assistant("y")]},
    "messages": {
        "prompt": [user("q")],
        "chosen": [user("q"), assistant("x")],
        "rejected": [user("q"), assistant("y")],
    },
    "numbers": {"prompt": "q", "chosen": 4, "rejected": [assistant(5)]},
    "another key": {"prompt": "q", "chosen": [assistant("x", weight=2)], "rejected": [assistant("y", name=None)]},
}


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "late.jsonl"])
@pytest.mark.parametrize("shape", [str, list])
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_text_stays_text_whatever_its_neighbours_are(write_rows, neighbour, shape, name):
    """`late`: the neighbour comes 11 MB after the first row, further than a reader looks that infers types."""
    rows = [
        {"prompt": text, "chosen": text, "rejected": "no"}
        if shape is str
        else {"prompt": text, "chosen": [assistant(text)], "rejected": [assistant("no")]}
        for text in JSON_LIKE
    ]
    filler = [PAIR | {"chosen": [assistant("x" * 11 * 2**20)]}] if name == "late.jsonl" else []
    path = write_rows(name, [*rows, *filler, NEIGHBOURS[neighbour]])
    pairs = load(path, "--max_dropped_fraction", "1")
    assert pairs.dropped.total() == (neighbour == "numbers")
    expected = JSON_LIKE if shape is str else [[assistant(text)] for text in JSON_LIKE]
    assert pairs.train["chosen"][: len(rows)] == expected


# ---- the account


BAD = {
    "malformed": {"prompt": "q", "chosen": [{"role": "assistant"}, {"text": "x"}], "rejected": [assistant("b")]},
    "last_turn_not_assistant": {"prompt": "q", "chosen": [user("a")], "rejected": [assistant("b")]},
    "prompts_differ": {"chosen": [user("q"), assistant("a")], "rejected": [user("p"), assistant("b")]},
    "empty_response": {"prompt": "q", "chosen": [assistant("")], "rejected": [assistant("b")]},
    "chosen_equals_rejected": {"prompt": "q", "chosen": [assistant("b")], "rejected": [assistant("b")]},
}


def test_every_row_is_kept_or_counted(write_rows):
    rows = [PAIR] * 5
    for n, row in enumerate(BAD.values(), 1):
        rows += [row] * n
    path = write_rows("bad.jsonl", rows)
    pairs = load(path, "--max_dropped_fraction", "0.9")
    assert pairs.dropped == {reason: n for n, reason in enumerate(BAD, 1)}
    assert pairs.rows == len(rows) == len(pairs.train) + pairs.dropped.total()
    assert pairs.as_dict()["dropped"] == dict(pairs.dropped)
    assert re.search(r"last turn is not the assistant's, first in row 7 +2\n", pairs.table()), pairs.table()


def test_dropped_rows_are_listed_by_the_number_in_their_own_file(write_rows, tmp_path):
    """Two sources, shuffled before the tokens are looked at."""
    first = write_rows("first.jsonl", [PAIR, BAD["empty_response"], *numbered(8), BAD["prompts_differ"]])
    long = PAIR | {"prompt": "word " * 200}
    second = write_rows("second.parquet", [*numbered(3), PAIR | {"rejected": PAIR["chosen"]}, long, *numbered(5)])
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"datasets": [{"path": str(first)}, {"path": str(second)}]}))
    cli = ["--max_dropped_fraction", "1", "--max_length", "64", "--eval_fraction", "0.2"]
    pairs = load_token_pairs(config(None, *cli, recipe=recipe), tiny_tokenizer())
    pairs.write_dropped(tmp_path / "dropped.jsonl")
    expected = [
        (str(first), 2, "empty_response"),
        (str(first), 11, "prompts_differ"),
        (str(second), 4, "chosen_equals_rejected"),
        (str(second), 5, "prompt_too_long"),
    ]
    lines = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [(line["source"], line["row"], line["reason"]) for line in lines] == expected
    assert f"first in row 11 of {first}" in pairs.table() and f"first in row 5 of {second}" in pairs.table()
    kept = [row for split in (pairs.train, pairs.eval) for row in zip(split["source"], split["row"], strict=True)]
    numbers = {(str(first), i) for i in range(1, 12)} | {(str(second), i) for i in range(1, 11)}
    assert sorted(kept) == sorted(numbers - {row[:2] for row in expected})


def test_max_dropped_fraction(write_rows):
    path = write_rows("bad.jsonl", [PAIR] * 19 + [BAD["empty_response"]])
    assert len(load(path).train) == 19  # exactly the default of 5%
    with pytest.raises(UserError, match=r"1 of 20 rows .*empty response.*max_dropped_fraction 0\.04"):
        load(path, "--max_dropped_fraction", "0.04")
    with pytest.raises(UserError, match=r"none of its 3 rows can be used \(3 x prompts .* differ, first in row 1\)"):
        load(write_rows("all.jsonl", [BAD["prompts_differ"]] * 3), "--max_dropped_fraction", "1")


def numbered(n, side="q"):
    return [{"prompt": f"{side}{i}", "chosen": [assistant("a")], "rejected": [assistant("b")]} for i in range(n)]


def prompts(pairs):
    return [row["prompt"][0]["content"] for row in pairs]


def test_max_samples_and_held_out_split_are_seeded_and_disjoint(write_rows):
    path = write_rows("many.jsonl", numbered(50))

    def run(*cli):
        pairs = load(path, *cli)
        return prompts(pairs.train), prompts(pairs.eval) if pairs.eval is not None else None

    train, held_out = run("--max_samples", "20", "--eval_fraction", "0.2")
    assert (len(train), len(held_out)) == (16, 4)
    assert len({*train, *held_out}) == 20
    assert (train, held_out) == run("--max_samples", "20", "--eval_fraction", "0.2")
    assert (train, held_out) != run("--max_samples", "20", "--eval_fraction", "0.2", "--seed", "1")
    assert len(run("--max_samples", "999")[0]) == 50
    with pytest.raises(UserError, match=r"eval_fraction 0\.001 of 50 pairs holds out 0"):
        run("--eval_fraction", "0.001")
    with pytest.raises(UserError, match=r"eval_fraction 0\.99 of 3 pairs holds out 3"):
        run("--max_samples", "3", "--eval_fraction", "0.99")


def test_mixture_with_fractions(write_rows, tmp_path):
    a, b = write_rows("a.jsonl", numbered(30, "a")), write_rows("b.parquet", numbered(40, "b"))
    recipe = tmp_path / "r.yaml"

    def run(*fractions):
        entries = [{"path": str(p), "fraction": f} for p, f in zip((a, b), fractions, strict=True)]
        recipe.write_text(json.dumps({"datasets": entries}))
        pairs = load_pairs(config(recipe=recipe))
        mixed = prompts(pairs.train)
        assert len(set(mixed)) == len(mixed)  # nothing twice
        assert pairs.rows == 70 and pairs.sources == [str(a), str(b)]
        return sum(p[0] == "a" for p in mixed), sum(p[0] == "b" for p in mixed)

    assert run(None, None) == (30, 40)
    assert run(0.5, 0.5) == (30, 30)
    assert run(3, 1) == (30, 10)
    assert run(0.1, 0.9) == (4, 40)


# ---- files


def test_a_folder_with_several_splits_gives_the_one_that_is_asked_for(write_rows, tmp_path):
    write_rows("copy/data/train-00000.parquet", [PAIR] * 3)
    write_rows("copy/data/test-00000.parquet", [PAIR] * 2)
    (tmp_path / "copy" / "README.md").write_text("# A dataset")
    assert len(load_rows(str(tmp_path / "copy"))) == 3
    assert len(load_rows(str(tmp_path / "copy"), split="test")) == 2
    with pytest.raises(UserError, match="validation"):
        load_rows(str(tmp_path / "copy"), split="validation")
    with pytest.raises(UserError, match="data_files x is for the Hub"):
        load_rows(str(tmp_path / "copy"), data_files="x")
    file = write_rows("rows.jsonl", [PAIR] * 4)
    assert len(load_rows(str(file), split="train[:50%]")) == 2
    with pytest.raises(UserError, match="test"):
        load_rows(str(file), split="test")


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "pairs.parquet", "folder with ü/pairs.jsonl"])
def test_formats(write_rows, name):
    path = write_rows(name, [PAIR, {"prompt": "r", "chosen": [assistant("x")], "rejected": [assistant("y")]}])
    for dataset in (path, path.parent) if "/" in name else (path,):
        rows = [
            tuple(row[side][-1]["content"] for side in ("prompt", "chosen", "rejected")) for row in load(dataset).train
        ]
        assert rows == [("q", "good", "bad"), ("r", "x", "y")]


def test_a_folder_is_the_sum_of_its_files_but_not_of_hidden_ones(write_rows, tmp_path):
    for name, n in (("a.jsonl", 2), ("sub/b.jsonl", 3), (".cache/c.parquet", 4)):
        write_rows(f"d/{name}", numbered(n, name[-7]))
    (tmp_path / "d" / "README.md").write_text("notes")
    assert sorted(prompts(load(tmp_path / "d").train)) == ["a0", "a1", "b0", "b1", "b2"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("empty.jsonl", b"", ["empty.jsonl", "empty"]),
        ("blank.jsonl", b"\n \n", ["blank.jsonl", "empty"]),
        ("empty.parquet", b"", ["empty.parquet", "empty"]),
        ("none.json", b"[]", ["none.json", "no rows"]),
        ("null.jsonl", b"null\n", ["null.jsonl", "line 1"]),
        ("bad.jsonl", b'{"chosen": "a", "rejected": "b"}\n\n{"chosen": \n', ["bad.jsonl", "line 3", "JSON"]),
        ("list.jsonl", b'{"chosen": "a", "rejected": "b"}\n[3]\n', ["list.jsonl", "line 2", "not a JSON object"]),
        ("bad.json", b'[{"chosen": "a"},\n{"chosen": }]', ["bad.json", "line 2", "JSON"]),
        ("binary.jsonl", b"\x80\x02\x00", ["binary.jsonl", "line 1"]),
        ("latin1.jsonl", b'{"chosen": "a\xe9", "rejected": "b"}\n', ["latin1.jsonl", "UTF-8"]),
        ("bad.parquet", b"PAR?", ["bad.parquet", "cannot be read"]),
        ("pairs.csv", b"chosen,rejected\na,b\n", ["pairs.csv", ".jsonl", ".parquet"]),
        ("pairs", b"{}", ["pairs", ".jsonl"]),
        ("one.jsonl", b'{"prompt": "q", "chosen": "a"}\n', ["no column rejected", "it has prompt, chosen"]),
        ("none.jsonl", b'{"text": "q"}\n', ["no column chosen or rejected", "it has text"]),
    ],
)
def test_broken_files_are_one_line(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(tmp_path / name)
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message


def test_missing_empty_and_mixed_folders_and_no_network(write_rows, tmp_path):
    for path in ("nowhere.jsonl", "./nowhere", "/nowhere/at/all", "~/nowhere.parquet", "a/b/c"):
        with pytest.raises(UserError, match="no such file or folder"):
            load(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="one format; found none"):
        load(tmp_path / "empty")
    write_rows("two/a.jsonl", [PAIR])
    write_rows("two/b.parquet", [PAIR])
    with pytest.raises(UserError, match=r"found \.jsonl, \.parquet"):
        load(tmp_path / "two")
    with pytest.raises(UserError, match=r"dataset_name org/pairs: the Hub cannot be reached .*prefetch"):
        load("org/pairs")


@pytest.mark.parametrize("name", ["secret.jsonl", "closed"])
def test_unreadable_file_and_folder(name):
    """As a user who is not root, whom permissions would not stop."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        Path(folder).chmod(0o755)
        path.mkdir() if name == "closed" else path.write_text(json.dumps(PAIR))
        path.chmod(0)
        users = os.getresuid()
        os.setresuid(*([users[0] or 65534] * 2), users[2])
        try:
            with pytest.raises(UserError, match=f"^dataset_name {path}: cannot be read; check its permissions$"):
                load_rows(str(path))
        finally:
            os.setresuid(*users)


# ---- real pairs, where they are

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
@pytest.mark.parametrize(("name", "rows"), [("pairs_prompt.jsonl", 280), ("pairs_chat.jsonl", 277)])
def test_real_pairs(name, rows):
    pairs = load(SHARED / name)
    assert pairs.rows == rows == len(pairs.train) + pairs.dropped.total()
    assert len(pairs.train) > 0.95 * rows
    assert all(row["prompt"][-1]["role"] == "user" for row in pairs.train)


@pytest.mark.slow
def test_a_full_cache_is_one_line(write_rows, tmp_path):
    """On a file system that is really full: needs root, and the right to mount."""
    path = write_rows("pairs.jsonl", [PAIR | {"prompt": f"{i} " + "q" * 1000} for i in range(600)])
    cache = tmp_path / "cache"
    cache.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", cache], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        code = "import sys; from sfm_dpo.config import parse_config; from sfm_dpo.data.preferences import load_pairs\n"
        code += "load_pairs(parse_config(sys.argv[1:]))"
        argv = [sys.executable, "-c", code, "--model_name_or_path", "m", "--use_cpu", "--dataset_name", str(path)]
        env = os.environ | {"HF_HOME": str(cache)}
        done = subprocess.run(argv, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True)
    finally:
        subprocess.run(["umount", cache], check=True)
    assert f"\nsfm_dpo.common.errors.UserError: HF_HOME: no space is left in {cache}/datasets" in done.stderr
