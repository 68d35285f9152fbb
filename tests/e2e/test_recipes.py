"""Every recipe trains: two steps with a tiny random model of its architecture, through its own launcher's CPU twin.

Overridden are the model, the data, output_dir, and:
    max_steps, global_batch_size   2 steps of 2 micro-batches on each process, of the recipe's own per-device size
    bf16, dtype                    there is no GPU, and 16 bit on a CPU is slow
    dataset_num_proc, report_to    one process reads a few rows; nothing is tracked
    preflight                      random weights find every answer impossible
Whatever else a recipe says is used, and its header's figures must be plan.py's.
"""

import contextlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts import plan
from tests.e2e.runs import ROOT, clean_environment, free_port

RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
PROCESSES, MICRO_BATCHES, STEPS = 2, 2, 2
OVERRIDDEN = {
    *("model_name_or_path", "dataset_name", "output_dir", "max_steps", "global_batch_size", "bf16", "dtype"),
    *("dataset_num_proc", "report_to", "preflight"),
}
# model_type is that of the shape which the header's plan names; the demo's model is a Llama
ARCHITECTURE = {"demo": "llama"}


def header(recipe: Path) -> str:
    """The comment at the top, commands joined to one line each."""
    lines = recipe.read_text().split("\nmodel_name_or_path", 1)[0]
    return re.sub(r" \\\n# +", " ", lines)


def launch_line(recipe: Path) -> str:
    return re.search(r"^# Launch +(.*)$", header(recipe), re.M)[1]


def launcher(recipe: Path) -> str:
    """What the header's Launch line uses: zero2, a name in configs/accelerate, or none for a single process."""
    launch = launch_line(recipe)
    named = re.search(r"LAUNCH=(\w+)", launch)
    if named:
        return named[1]
    return "zero2" if re.search(r"\b(sbatch|accelerate launch)\b", launch) else "none"


def plan_command(recipe: Path) -> list[str]:
    found = re.search(r"^# Plan +python scripts/plan\.py (.*)$", header(recipe), re.M)
    return shlex.split(found[1]) if found else []


def architecture(recipe: Path) -> str:
    command = plan_command(recipe)
    if not command:
        return ARCHITECTURE[recipe.stem]
    shape = command[command.index("--model_name_or_path") + 1]
    return json.loads((ROOT / shape / "config.json").read_text())["model_type"]


def rows(dataset: str) -> list[dict]:
    """Rows in the shape of the recipe's data, 32 pairs of many lengths."""
    made = []
    for i in range(32):
        question = [{"role": "user", "content": f"What is {i} and {i * i}?"}]
        answers = [
            f"{i + i * i}." + " Indeed." * (i % 5),
            "Well, that depends on many things, " * (1 + i % 3) + f"{i}.",
        ]
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
        if "Dolci-Think" in dataset:
            made.append({"prompt": question[0]["content"], "chosen": chosen, "rejected": rejected, "dataset": "x"})
        elif "Dolci-Instruct" in dataset:
            extra = {"function_calls": None, "functions": None}
            sides = [[message | extra for message in question + side] for side in (chosen, rejected)]
            made.append({"chosen": sides[0], "rejected": sides[1], "prompt_id": str(i)})
        else:  # the mixes of Tulu 3 and OLMo 2: whole conversations beside the prompt
            prompt = question[0]["content"]
            made.append({"prompt": prompt, "chosen": question + chosen, "rejected": question + rejected, "id": str(i)})
    return made


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_folder) -> dict[str, Path]:
    """Folder of each recipe's run. Recipes with the same launcher share one set of processes."""
    folder = tmp_path_factory.mktemp("recipes")
    by_launcher: dict[str, list[list[str]]] = {}
    for recipe in RECIPES:
        given = yaml.safe_load(recipe.read_text())
        data = folder / f"{recipe.stem}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(given["dataset_name"])))
        launch = launcher(recipe)
        processes = 1 if launch == "none" else PROCESSES
        batch = given["per_device_train_batch_size"] * processes * MICRO_BATCHES
        fields = {
            "model_name_or_path": tiny_folder(architecture(recipe)),
            "dataset_name": data,
            "output_dir": folder / recipe.stem,
            "max_steps": STEPS,
            "global_batch_size": batch,
            "bf16": "false",
            "dtype": "float32",
            "dataset_num_proc": 1,
            "report_to": "none",
            "preflight": "skip",
        }
        assert fields.keys() == OVERRIDDEN
        argv = ["--config", str(recipe)]
        argv += [part for name, value in fields.items() for part in (f"--{name}", str(value))]
        by_launcher.setdefault(launch, []).append(argv)

    env = clean_environment(folder / "hf")
    for launch, argvs in by_launcher.items():
        (folder / f"{launch}.json").write_text(json.dumps(argvs))
        command = [sys.executable]
        if launch != "none":
            config = "cpu" if launch == "zero2" else f"cpu_{launch}"
            command += ["-m", "accelerate.commands.launch", "--num_processes", str(PROCESSES)]
            command += ["--config_file", str(ROOT / f"configs/accelerate/{config}.yaml")]
            command += ["--main_process_port", str(free_port())]
        command += [str(ROOT / "tests/e2e/many_runs.py"), str(folder / f"{launch}.json")]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
        print(done.stdout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {recipe.stem: folder / recipe.stem for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_two_steps(runs, recipe):
    run = runs[recipe.stem]
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "done" and status["step"] == STEPS
    given, used = yaml.safe_load(recipe.read_text()), yaml.safe_load((run / "resolved_config.yaml").read_text())
    for name, value in given.items():
        if name not in OVERRIDDEN:
            assert used[name] in (value, [value]), name
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == STEPS
    assert used["loss_type"] == ["sigmoid_norm"]  # for which the first step's loss is ln 2
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["world_size"] == (1 if launcher(recipe) == "none" else PROCESSES)
    if launcher(recipe) != "none":
        complete = json.loads((run / f"checkpoint-{STEPS}" / "complete.json").read_text())
        assert complete["launch"].replace("-", "").lower() == launcher(recipe)
    if used["use_peft"]:
        assert (run / "adapter_model.safetensors").is_file()


def computed(figures: dict, launch: str) -> str:
    """The header's line of what plan.py says."""
    gpu, batch, time = figures["gpu"], figures["batch"], figures["time"]
    gpus = gpu["num_gpus"] * gpu["nodes"]
    total = figures["launches"][launch]["total"][json.dumps(batch["checkpointing"])] / 2**30
    hours = sum(time["hours"].values())
    long = f"{hours:.1f} hours, {hours * gpus:.0f} GPU-hours" if hours >= 0.05 else "a few minutes"
    on = f"each of {gpus}" if gpus > 1 else "a"
    return f"{total:.1f} GiB on {on} {gpu['name']}; {long} at {time['mfu']:.1%} MFU; not measured"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_header_says_what_plan_says(recipe, tmp_path, monkeypatch):
    command = plan_command(recipe)
    if not command:
        pytest.skip("runs on a CPU; its header says what was measured")
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")  # plan.py sets it for good
    with contextlib.redirect_stdout(io.StringIO()):
        assert plan.main([*command, "--json", str(tmp_path / "plan.json")]) == 0
    figures = json.loads((tmp_path / "plan.json").read_text())
    facts = figures["launches"][launcher(recipe)]
    line = computed(figures, launcher(recipe))
    assert f"# Computed   {line}\n" in recipe.read_text(), line
    assert facts["total"]["true"] <= figures["gpu"]["memory"] * figures["gpu"]["usable"]
    # the plan is of as many GPUs as Launch asks for
    options = dict(re.findall(r"--(nodes|gpus-per-node)=(\d+)", launch_line(recipe)))
    asked = int(options.get("nodes", 1)), int(options.get("gpus-per-node", 4))  # the batch scripts' defaults
    assert (figures["gpu"]["nodes"], figures["gpu"]["num_gpus"]) == asked
