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
from pathlib import Path

import pytest
import yaml

from scripts import plan
from sfm_dpo.model.memory_plan import Setting
from tests.e2e.runs import ROOT, Place, as_options

RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
PROCESSES, MICRO_BATCHES, STEPS = 2, 2, 2
OVERRIDDEN = {
    *("model_name_or_path", "dataset_name", "output_dir", "max_steps", "global_batch_size", "bf16", "dtype"),
    *("dataset_num_proc", "report_to", "preflight"),
}


def header(recipe: Path, name: str) -> str:
    """The command behind Launch or Plan in the comment at the top, joined to one line; empty where there is none."""
    lines = re.sub(r" \\\n# +", " ", recipe.read_text().split("\nmodel_name_or_path", 1)[0])
    command = re.search(rf"^# {name} +(.*)$", lines, re.M)
    return command[1] if command else ""


def launcher(recipe: Path) -> str:
    """What the header's Launch line uses: zero2, a name in configs/accelerate, or none for a single process."""
    launch = header(recipe, "Launch")
    if named := re.search(r"LAUNCH=(\w+)", launch):
        return named[1]
    return "zero2" if re.search(r"\b(sbatch|accelerate launch)\b", launch) else "none"


def architecture(recipe: Path) -> str:
    """model_type of the shape which the header's plan names; the demo's model is a Llama."""
    shape = re.search(r"--model_name_or_path (\S+)", header(recipe, "Plan"))
    return json.loads((ROOT / shape[1] / "config.json").read_text())["model_type"] if shape else "llama"


def rows(dataset: str) -> list[dict]:
    """Rows in the shape of the recipe's data, 32 pairs of many lengths."""
    pairs = []
    for i in range(32):
        question = [{"role": "user", "content": f"What is {i} and {i * i}?"}]
        answers = f"{i + i * i}." + " Indeed." * (i % 5), "Well, that depends on many things, " * (1 + i % 3) + f"{i}."
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in answers)
        if "Dolci-Think" in dataset:
            pair = {"prompt": question[0]["content"], "chosen": chosen, "rejected": rejected, "dataset": "x"}
        elif "Dolci-Instruct" in dataset:
            extra = {"function_calls": None, "functions": None}
            chosen, rejected = ([message | extra for message in question + side] for side in (chosen, rejected))
            pair = {"chosen": chosen, "rejected": rejected, "prompt_id": str(i)}
        else:  # the mixes of Tulu 3 and OLMo 2: whole conversations beside the prompt
            pair = {"prompt": question[0]["content"], "chosen": question + chosen, "rejected": question + rejected}
        pairs.append(pair)
    return pairs


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, tiny_folder) -> dict[str, Path]:
    """Folder of the run of each recipe that is tested. Recipes with the same launcher share one set of processes."""
    folder = tmp_path_factory.mktemp("recipes")
    by_launcher: dict[str, list[list[str]]] = {}
    chosen = {item.callspec.params["recipe"] for item in request.session.items if "runs" in item.fixturenames}
    for recipe in sorted(chosen):
        given = yaml.safe_load(recipe.read_text())
        data = folder / f"{recipe.stem}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(given["dataset_name"])))
        launch = launcher(recipe)
        processes = 1 if launch == "none" else PROCESSES
        batch = given.get("per_device_train_batch_size", 2) * processes * MICRO_BATCHES
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
        by_launcher.setdefault(launch, []).append(["--config", str(recipe), *as_options(fields)])
    for launch, argvs in by_launcher.items():
        config = "cpu" if launch in ("zero2", "none") else f"cpu_{launch}"
        Place(folder, folder, folder / "hf").start_together(argvs, 1 if launch == "none" else PROCESSES, config)
    return {recipe.stem: folder / recipe.stem for recipe in chosen}


# The others, under ZeRO-3 and FSDP2 as well, in the grid; the demo: test_commands.py
FIRST = {"think", "instruct", "instruct_lora"}
PARAMETERS = [pytest.param(r, id=r.stem, marks=[] if r.stem in FIRST else [pytest.mark.grid]) for r in RECIPES]


@pytest.mark.parametrize("recipe", PARAMETERS)
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
    gpu, batch, times = figures["gpu"], figures["batch"], figures["time"]["hours"]
    gpus = gpu["num_gpus"] * gpu["nodes"]
    choice = Setting(**figures["launches"][launch]["choice"])
    setting = f" ({choice.per_device} pairs each, {choice.layers} checkpointed)" if batch["chosen"] else ""
    hours = [time["training"] + time["reference"] for time in times]
    long = f"{hours[0]:.1f} to {hours[-1]:.0f} hours" if hours[-1] >= 1 else "minutes"
    on = f"each of {gpus}" if gpus > 1 else "a"
    at = f"{times[0]['mfu']:.1%} to {times[-1]['mfu']:.1%} MFU"
    return f"{choice.bytes / 2**30:.1f} GiB on {on} {gpu['name']}{setting}; {long} at {at}, as published; not measured"


@pytest.mark.parametrize("recipe", PARAMETERS)
def test_header_says_what_plan_says(recipe, tmp_path, monkeypatch):
    if not (command := shlex.split(header(recipe, "Plan").removeprefix("python scripts/plan.py"))):
        pytest.skip("runs on a CPU; its header says what was measured")
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")  # plan.py sets it for good
    monkeypatch.setattr("sfm_dpo.common.files.CALIBRATION", tmp_path / "none")
    with contextlib.redirect_stdout(io.StringIO()):
        assert plan.main([*command, "--json", str(tmp_path / "plan.json")]) == 0
    figures = json.loads((tmp_path / "plan.json").read_text())
    facts = figures["launches"][launcher(recipe)]
    line = computed(figures, launcher(recipe))
    assert f"# Computed   {line}\n" in recipe.read_text(), line
    assert facts["choice"]["bytes"] <= figures["gpu"]["limit"]
    row = next(line for line in (ROOT / "docs/recipes.md").read_text().splitlines() if f"| `{recipe.stem}` |" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    hours = [entry["training"] + entry["reference"] for entry in figures["time"]["hours"]]
    assert cells[6].split()[0] == line.split()[0]
    assert cells[7].split(" (")[0] == (" / ".join(f"{h:.1f}" for h in hours) if hours[-1] >= 1 else "minutes"), hours
    # the plan is of as many GPUs as Launch asks for
    options = dict(re.findall(r"--(nodes|gpus-per-node)=(\d+)", header(recipe, "Launch")))
    asked = int(options.get("nodes", 1)), int(options.get("gpus-per-node", 4))  # the batch scripts' defaults
    assert (figures["gpu"]["nodes"], figures["gpu"]["num_gpus"]) == asked
