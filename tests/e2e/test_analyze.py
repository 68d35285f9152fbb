"""scripts/analyze_dataset.py as a user starts it: what it prints and writes, and its error lines."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from sfm_dpo.common.files import PROJECT

SCRIPT = PROJECT / "scripts" / "analyze_dataset.py"
ROWS = [
    {
        "prompt": f"Wie viele Äpfel? {i}",
        "chosen": [{"role": "assistant", "content": "two " * (1 + i % 9)}],
        "rejected": [{"role": "assistant", "content": "I cannot say " * (1 + i % 4)}],
    }
    for i in range(60)
]


def run(*argv, python=(), **env) -> subprocess.CompletedProcess:
    """In a process of its own."""
    command = [sys.executable, *python, str(SCRIPT), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=os.environ | env, timeout=300)


@pytest.fixture
def start(environment, monkeypatch, capsys):
    """A function: as `run`, without the seconds that a new process takes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    spec = importlib.util.spec_from_file_location("analyze_dataset", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def main(*argv) -> subprocess.CompletedProcess:
        capsys.readouterr()
        code = script.main([str(word) for word in argv])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        return subprocess.CompletedProcess(argv, code, *capsys.readouterr())

    return main


def test_help_imports_nothing_slow():
    done = run("--help", python=("-X", "importtime"))
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "transformers", "datasets", "trl", "numpy"}
    assert done.returncode == 0 and "--min_coverage" in done.stdout and "DATASET" in done.stdout


def test_what_it_prints_and_writes(write_rows, tiny_folder, tmp_path):
    files = {kind: tmp_path / f"out.{end}" for kind, end in (("json", "json"), ("plot", "png"), ("html", "html"))}
    options = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    options += ["--seed", "3", "--model_name_or_path", tiny_folder("olmo3")]
    done = run(write_rows("pairs.jsonl", ROWS), *options, HF_DATASETS_DISABLE_PROGRESS_BARS="0")
    assert done.returncode == 0, done.stderr
    result = json.loads(files["json"].read_text())
    best = result["recommendation"]
    pasted = yaml.safe_load(done.stdout[done.stdout.index("\nmax_length:") :])
    assert pasted == {"max_length": best["max_length"]} == {"max_length": 128} and result["seed"] == 3
    assert "max_prompt_length: not needed" in done.stdout
    assert all(row["flops"] > row["tokens"] for row in result["candidates"])  # from the folder's config.json
    assert best["limit"] == 512 and max(row["max_length"] for row in result["candidates"]) == 256
    assert re.search(r"assistant\n  chosen, \d+ tokens\n    \| two ", done.stdout)
    assert "Tokenizing" in done.stderr and "/60" in done.stderr  # a bar with an ETA
    assert files["plot"].stat().st_size > 10_000 and "max_length 128" in files["html"].read_text()


def test_options_override_the_recipe_and_every_key_of_the_json_is_documented(write_rows, tiny_folder, tmp_path, start):
    recipe = {"model_name_or_path": str(tiny_folder("llama")), "dataset_name": "nobody/nothing", "bf16": True}
    recipe |= {"global_batch_size": 8, "max_length": 64, "max_prompt_length": 30, "output_dir": str(tmp_path / "run")}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    data, file = write_rows("pairs.jsonl", ROWS), tmp_path / "out.json"
    argv = (data, "--config", tmp_path / "r.yaml", "--json", file, "--min_coverage", "0", "--max_samples", "40")
    against = write_rows(
        "set.jsonl", [{"question": f"{ROWS[3]['prompt']} {'two ' * 9}", "answer": "I cannot say " * 9}]
    )
    argv = (*argv, "--against", against, f"{against}:answer", "--ngram", "6", "--html", tmp_path / "page.html")
    done = start(*argv)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["dataset"] == [str(data)] and result["recommendation"]["max_prompt_length"] == 30
    assert not (tmp_path / "run").exists()  # nothing is written but --json and --html
    sets = result["contamination"]["sets"]
    assert sets[1]["set"].endswith(":answer") and sets[0]["pairs"] > sets[1]["pairs"] > 0
    assert f"{sets[1]['pairs']} pairs have 6 words in a row in common" in " ".join(done.stdout.split())
    assert sets[1]["examples"][0]["set_text"][:60] in (tmp_path / "page.html").read_text()

    def keys(value):
        if isinstance(value, dict):
            yield from (key for key in value if not key.isdigit())
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(inner)

    names, documented = set(keys(result)), (PROJECT / "docs" / "lengths.md").read_text()
    assert len(names) > 40 and not {name for name in names if f"`{name}`" not in documented}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("{data}", "--model_name_or_path", "{model}", "--max_lenght", "7"), "did you mean --max_length?"),
        (("{data}", "--model_name_or_path", "{tmp}"), "no tokenizer can be loaded"),
        (("allenai/Dolci-Think-DPO-7B", "--model_name_or_path", "{model}"), "the Hub cannot be reached"),
    ],
)
def test_mistakes_are_one_line(argv, expected, write_rows, tiny_folder, tmp_path, start):
    places = {"tmp": tmp_path, "data": write_rows("pairs.jsonl", ROWS), "model": tiny_folder("llama")}
    done = start(*(word.format(**places) for word in argv))
    *before, line = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout and expected in line and line.startswith("error: ")
    assert not any(line.startswith(("error: ", "Traceback")) for line in before)
