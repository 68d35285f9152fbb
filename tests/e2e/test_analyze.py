"""scripts/analyze_dataset.py as a user starts it: what it prints and writes."""

import json

import analyze_dataset
import pytest
import yaml

from tests.toolbox import as_options

ROWS = [
    {"prompt": f"Wie viele Äpfel? {i}", "chosen": "two " * (1 + i % 9), "rejected": "I cannot say " * (1 + i % 4)}
    for i in range(60)
]


def test_what_it_prints_and_writes(write_rows, tiny_folder, tmp_path, environment, capsys):
    files = {"json": tmp_path / "out.json", "plot": tmp_path / "out.png"}
    options = as_options(files | {"model_name_or_path": tiny_folder("olmo3")})
    assert analyze_dataset.main([str(write_rows("pairs.jsonl", ROWS)), *options]) == 0
    out = capsys.readouterr().out
    result = json.loads(files["json"].read_text())
    best = result["recommendation"]
    pasted = yaml.safe_load(out[out.index("\nmax_length:") :])
    assert pasted == {"max_length": 128, "max_prompt_length": None} and pasted.items() <= best.items()
    assert all(row["flops"] > row["tokens"] for row in result["candidates"])  # from the folder's config.json
    assert max(row["max_length"] for row in result["candidates"]) == 256
    assert files["plot"].stat().st_size > 10_000


@pytest.mark.parametrize("option", ["--json", "--dropped"])
def test_the_dataset_is_not_overwritten(write_rows, tiny_folder, tmp_path, monkeypatch, capsys, option):
    data = write_rows("pairs.jsonl", ROWS)
    before = data.read_bytes()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"datasets": [{"path": "pairs.jsonl"}]}))
    argv = ["--config", "r.yaml", "--model_name_or_path", str(tiny_folder("olmo3")), option, "pairs.jsonl"]
    assert analyze_dataset.main(argv) == 2 and data.read_bytes() == before
    assert "pairs.jsonl: is the dataset itself, or in its folder; choose another file" in capsys.readouterr().err


def test_the_unusable_rows_are_listed_where_no_pair_is_left(write_rows, tiny_folder, tmp_path, environment):
    data = write_rows("equal.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "a"}] * 2)
    argv = [str(data), "--model_name_or_path", str(tiny_folder("olmo3")), "--dropped", str(tmp_path / "d.jsonl")]
    assert analyze_dataset.main(argv) == 2
    assert [json.loads(line)["row"] for line in (tmp_path / "d.jsonl").open()] == [1, 2]
