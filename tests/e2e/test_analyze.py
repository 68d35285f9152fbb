"""scripts/analyze_dataset.py as a user starts it: what it prints and writes, what a mistake says."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.tiny_models import tiny_tokenizer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "analyze_dataset.py"


def rows(n: int = 60) -> list[dict]:
    return [
        {
            "prompt": f"Wie viele Äpfel? {i}",
            "chosen": [{"role": "assistant", "content": "two " * (1 + i % 9)}],
            "rejected": [{"role": "assistant", "content": "I cannot say " * (1 + i % 4)}],
        }
        for i in range(n)
    ]


def run(*argv, **env) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | env, timeout=300)


@pytest.fixture
def in_process(environment, monkeypatch, capsys):
    """A function: as `run`, without the seconds that a new process takes."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    spec = importlib.util.spec_from_file_location("analyze_dataset", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def start(*argv) -> subprocess.CompletedProcess:
        capsys.readouterr()
        code = script.main([str(word) for word in argv])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        return subprocess.CompletedProcess(argv, code, *capsys.readouterr())

    return start


@pytest.fixture
def error_in_process(in_process):
    """A function: arguments -> the line that a mistake gives."""

    def error(*argv) -> str:
        done = in_process(*argv)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.stderr

    return error


def error_of(*argv, **env) -> str:
    done = run(*argv, **env)
    assert done.returncode == 2 and not done.stdout, (done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith(lines[0])
    return lines[0]


def test_help_comes_at_once_and_imports_no_torch():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    assert time.monotonic() - start < 10  # 0.1 s on a machine with nothing else to do
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported and not imported & {"torch", "transformers", "datasets", "trl", "numpy"}
    assert "--min_coverage" in done.stdout and "DATASET" in done.stdout


def test_what_it_prints_and_writes(write_rows, tiny_folder, tmp_path):
    files = {kind: tmp_path / f"out.{end}" for kind, end in (("json", "json"), ("plot", "png"), ("html", "html"))}
    options = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    done = run(  # DATASET after the options, one of them not the script's own
        *options,
        *("--seed", "3", write_rows("pairs.jsonl", rows()), "--model_name_or_path", tiny_folder("olmo3")),
        HF_DATASETS_DISABLE_PROGRESS_BARS="0",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(files["json"].read_text())
    best = result["recommendation"]
    pasted = yaml.safe_load(done.stdout[done.stdout.index("\nmax_length:") :])
    assert pasted == {"max_length": best["max_length"], "max_prompt_length": best["max_prompt_length"]}
    assert pasted == {"max_length": 256, "max_prompt_length": 128} and result["seed"] == 3
    assert all(row["flops"] > row["tokens"] for row in result["candidates"])  # from the folder's config.json
    assert best["limit"] == 512 and max(row["max_length"] for row in result["candidates"]) == 512
    assert re.search(r"chosen +\.\.\.stant\\n \|\| two ", done.stdout)
    assert "Tokenizing" in done.stderr and "/60" in done.stderr  # a bar with an ETA
    assert files["plot"].stat().st_size > 10_000 and "max_length 256" in files["html"].read_text()


def test_every_key_of_the_json_is_documented(write_rows, tiny_folder, tmp_path, in_process):
    file = tmp_path / "out.json"
    in_process(
        write_rows("p.jsonl", rows()),
        "--model_name_or_path",
        tiny_folder("llama"),
        "--json",
        file,
        "--max_samples",
        "40",
    )
    documented = (ROOT / "docs" / "lengths.md").read_text()

    def keys(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                if not key.isdigit():
                    yield key
                yield from keys(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from keys(inner)

    found = set(keys(json.loads(file.read_text())))
    assert len(found) > 40 and not {key for key in found if f"`{key}`" not in documented}


def test_a_recipe_is_taken_and_overridden(write_rows, tiny_folder, tmp_path, in_process):
    recipe = {
        "model_name_or_path": str(tiny_folder("llama")),
        "dataset_name": "nobody/nothing",
        "global_batch_size": 8,
        "max_length": 64,
        "max_prompt_length": 30,
        "output_dir": str(tmp_path / "run"),
        "bf16": True,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    data = write_rows("pairs.jsonl", rows())
    done = in_process(
        data, "--config", tmp_path / "recipe.yaml", "--json", tmp_path / "out.json", "--min_coverage", "0"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["dataset"] == [str(data)] and result["recommendation"]["max_prompt_length"] == 30
    assert not (tmp_path / "run").exists()  # nothing but what was asked for is written


@pytest.mark.parametrize("case", ["missing", "empty", "line", "column", "dropped", "option", "share", "model"])
def test_mistakes_are_one_line(case, write_rows, tiny_folder, tmp_path, error_in_process):
    data, model, more = tmp_path / "pairs.jsonl", tiny_folder("llama"), []
    if case == "missing":
        expected = "no such file or folder"
    elif case == "empty":
        data.touch()
        expected = "the file is empty"
    elif case == "line":
        data.write_text("\n".join([json.dumps(rows()[0])] * 3 + ["{broken", ""]))
        assert "line 4 is not valid JSON" in error_of(data, "--model_name_or_path", model)  # datasets logs a line too
        return
    elif case == "column":
        write_rows("pairs.jsonl", [{"question": "a", "answer": "b"}])
        expected = "no column chosen or rejected; it has question, answer"
    elif case == "dropped":
        write_rows("pairs.jsonl", [row | {"chosen": row["rejected"]} for row in rows(5)])
        expected = "none of its 5 rows can be used"
    elif case == "option":
        write_rows("pairs.jsonl", rows())
        more, expected = ["--max_lenght", "7"], "did you mean --max_length?"
    elif case == "share":
        write_rows("pairs.jsonl", rows())
        more, expected = ["--min_coverage", "95"], "--min_coverage"
        done = run(data, *more)
        assert done.returncode == 2 and "must be a number from 0 to 1" in done.stderr
        return
    else:
        write_rows("pairs.jsonl", rows())
        model, expected = tmp_path / "nothing", "no tokenizer can be loaded"
    assert expected in error_in_process(data, "--model_name_or_path", model, *more)


def test_conversations_need_a_chat_template(write_rows, tmp_path, in_process, error_in_process):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    data = write_rows("pairs.jsonl", rows())
    assert "no chat template" in error_in_process(data, "--model_name_or_path", tmp_path / "model")
    text = [{k: v if k == "prompt" else v[0]["content"] for k, v in row.items()} for row in rows()]
    assert in_process(write_rows("text.jsonl", text), "--model_name_or_path", tmp_path / "model").returncode == 0


def test_a_hub_that_cannot_be_reached(write_rows, tiny_folder, tmp_path, error_in_process):
    """Offline; and a closed port on loopback, which huggingface_hub tries again and again, here without its pauses."""
    said = error_in_process("allenai/Dolci-Think-DPO-7B", "--model_name_or_path", tiny_folder("llama"))
    assert "the Hub cannot be reached" in said
    said = error_in_process(write_rows("pairs.jsonl", rows()), "--model_name_or_path", "allenai/Olmo-3-7B")
    assert said.startswith("error: model_name_or_path allenai/Olmo-3-7B: no tokenizer can be loaded")
    no_pauses = "import runpy, sys, time; time.sleep = lambda s: None; del sys.argv[0]; "
    no_pauses += "runpy.run_path(sys.argv[0], run_name='__main__')"
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", no_pauses, SCRIPT, "allenai/Dolci-Think-DPO-7B"]
    command += ["--model_name_or_path", tiny_folder("llama")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | nowhere, timeout=300)
    assert done.returncode == 2 and "the Hub cannot be reached" in done.stderr.splitlines()[-1], done.stderr
