"""Every command in the README and in docs/ is run, bears a mark there (GPU, minutes, hours), or is in ELSEWHERE.

In a copy of the project with tiny recipes, where the Hub's names are folders, and with a Hub on loopback. Scripts run
in this process, which saves the seconds of their imports.
"""

import io
import itertools
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sfm_dpo.run.folder import read_status
from tests import hub_server
from tests.commands import MARK, commands, runnable
from tests.e2e.runs import clean_environment, free_port
from tests.project import SOURCE, link, make_project

# Run elsewhere, or not ours to run
ELSEWHERE = {
    r"make (test|setup|lint|lock|check|test-grid|transformers4|upgrade)": "how tests are run",
    r"([A-Z]+=\S+ )?(python -m )?pytest .*": "tests",
    r"python scripts/status.py --stop outputs/.*": "tests/run/test_status.py: of a run that runs",
    r"make demo": "README.md marks it: 4 minutes",
    r"(?!.*\.\.\.)([A-Z_]+=\S+ )*sbatch .*": "tests/slurm/test_submit.py",
    r"touch .*STOP|scancel .*": "tests/slurm/test_requeue.py",
    r"accelerate launch|accelerate launch --config_file accelerate_config.yaml train_dpo.py": "4 GPUs",
    r"python .* outputs/low": "as with outputs/high",
    r"accelerate launch --main_process_port 29600": "every start of two processes here chooses a port",
    r".*python bench/throughput.py.* --rounds \d.*": "minutes to half an hour; test_bench.py runs --quick",
    r"source .*|git (clone|lfs) .*|trl dpo.*|hf (auth login|upload .*)|(python -m venv|\S*pip install) .*": "others",
    r"wandb (sync|leet|login).*": "W&B's",
}


def elsewhere(line: str) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in ELSEWHERE)


# With a tiny model it does not take minutes
MARKED = [line for line in runnable("python", marked=True) if "train_dpo.py" in line]
SCRIPTS = [line for line in runnable("python") if not elsewhere(line)] + MARKED
LAUNCHED = [line for line in runnable("accelerate|torchrun") if not elsewhere(line)]


def test_no_command_is_forgotten():
    bare = {re.split(r"\s+#", line)[0] for line in commands() if not MARK.search(line)}
    assert {line for line in bare if not elsewhere(line)} | {*MARKED} == {*SCRIPTS, *LAUNCHED}
    assert not [pattern for pattern in ELSEWHERE if not any(re.fullmatch(pattern, line) for line in bare)]


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """The project after a run, outputs/dpo, with what the commands call MODEL, R, RUN, my-org/..."""
    import train_dpo

    project = make_project(tmp_path_factory.mktemp("commands"))
    for name in ("MODEL", "M", "my-org/my-model"):
        link(project, name, "tiny model")
    link(project, "my-org/my-pairs", "pairs")
    link(project, "geodesic-research/sfm-sft_dolci_instruct_unfiltered", "tiny model")
    shutil.copy(project / "pairs" / "train.jsonl", project / "pairs.jsonl")
    shutil.copy(project / "recipes" / "think.yaml", project / "R")
    shutil.copy(project / "recipes" / "think.yaml", project / "recipes" / "mine.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert train_dpo.main(["--config", "recipes/think.yaml", "--save_steps", "2"]) == 0
        lora = ["--use_peft", "true", "--output_dir", "outputs/lora"]
        assert train_dpo.main(["--config", "recipes/think.yaml", *lora]) == 0
    outputs = project / "outputs"
    for name in ("low", "high", "sweep", "round-1"):
        shutil.copytree(outputs / "dpo", outputs / name)
    shutil.copytree(outputs / "dpo" / "checkpoint-2", outputs / "dpo" / "checkpoint-500")
    link(project, "RUN", "outputs/dpo")
    return project


@pytest.fixture
def project(template, tmp_path, monkeypatch, hub, environment) -> Iterator[Path]:
    """A fresh copy for each command; what scripts do to their process ends with them."""
    monkeypatch.setattr(hub_server, "ORG", "my-org")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handler = signal.getsignal(signal.SIGTERM)
    copy = Path(shutil.copytree(template, tmp_path / "my project", symlinks=True))
    monkeypatch.chdir(copy)
    yield copy
    signal.signal(signal.SIGTERM, handler)
    torch.use_deterministic_algorithms(False)


def is_trained(project: Path, words: list[str]) -> bool:
    given = dict(itertools.pairwise(words))
    run = given.get("--output_dir") or {"recipes/demo.yaml": "outputs/demo"}.get(given["--config"], "outputs/dpo")
    return read_status(project / run)["state"] == "done"


def parameters(lines: list[str]) -> list:
    """The lines as parameters; those that take five seconds of CPU and more are in the grid."""
    long = r"python bench/.*|python train_dpo\.py --config .*|.*recipes/demo.yaml.*|accelerate .*"
    long += r"|python scripts/plan\.py .*/.* --lengths .*|torchrun .*|python train_dpo\.py \.\.\. .*"
    return [pytest.param(line, marks=[pytest.mark.grid] if re.fullmatch(long, line) else []) for line in lines]


@pytest.mark.parametrize("line", parameters(SCRIPTS))
def test_script(project, line, monkeypatch, capsys):
    if "train_dpo.py" in line:  # these are the finished runs of the others
        for name in ("dpo", "low", "high"):
            shutil.rmtree(project / "outputs" / name)
    words = shlex.split(line.replace(" ... ", " --config recipes/think.yaml "))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words.pop(0) == "python"
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2?\nAnd 3?\n"))
    if "--lengths lengths.json" in line:  # from the command before it
        shutil.copy("bench/shapes/dolci_think_lengths.json", "lengths.json")
    if "--num_gpus 8" in line:  # the batch of the tiny recipe is 4
        words += ["--global_batch_size", "8"]
    if "bench/shapes" in line:  # a plan of the real model: with the real recipe
        shutil.copytree(SOURCE / "recipes", "recipes", dirs_exist_ok=True)
    with pytest.raises(SystemExit) as ended:
        sys.exit(runpy.run_path(words[0], run_name="__main__") and 0)
    out, err = capsys.readouterr()
    code = 3 if words[0] == "scripts/preflight.py" else 0  # no-go: random weights find every answer impossible
    assert (ended.value.code or 0) == code and "Traceback" not in out + err, out + err
    assert err.count("error: ") == bool(code), err
    if words[0] == "train_dpo.py" and "--help" not in words:
        assert is_trained(project, words)
    if words[0] == "scripts/preflight.py":  # in a temporary folder
        assert "report.html" not in out and "training /" not in out, out
    if words[0] == "scripts/generate.py":
        assert out.count("prompt: ") == out.count("base: ") == out.count("trained: ") == 2, out
    for option, file in itertools.pairwise(words):
        assert option not in ("--json", "--html", "--plot") or (project / file).stat().st_size > 100, file


@pytest.mark.parametrize("line", parameters(LAUNCHED))
def test_launched(project, line):
    env = clean_environment(project / "hf") | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    words = shlex.split(line)
    if words[0] == "accelerate":
        words[2:2] = ["--main_process_port", "0"]
    else:
        words[1:1] = ["--master-port", str(free_port())]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "train_dpo.py" not in words or is_trained(project, words)


@pytest.mark.grid
def test_script_of_the_docs_trains_with_the_installed_package(tmp_path, tiny_folder):
    """docs/extending.md's, by what `pip install .` brings, in a folder without the project."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(site)]
    source = shutil.copytree(SOURCE, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "outputs", "logs"))
    subprocess.run([*install, str(source)], check=True, capture_output=True)
    (tmp_path / "my-org").mkdir()
    (tmp_path / "my-org/my-model").symlink_to(tiny_folder("llama"))
    script = re.search(r"```python\n(.*?)```", (SOURCE / "docs/extending.md").read_text(), re.S)[1]
    script = script.replace("--global", "--use_cpu --preflight skip --global") + "raise SystemExit(code)\n"
    env = clean_environment(tmp_path / "hf") | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 4 margin" in done.stdout
    assert read_status(tmp_path / "outputs/mine")["state"] == "done"
