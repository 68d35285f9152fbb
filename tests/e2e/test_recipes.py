"""Every kind of recipe trains: two steps with a tiny random model of its architecture, by its own launcher on the CPU.

Overridden is, beside model and data, what takes long on a CPU: 16 bit, large batches, Inductor. All else is used.
"""

import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml

from scripts import plan
from tests.commands import text
from tests.e2e.runs import ROOT, Place
from tests.toolbox import as_options, logged, pairs, sampled, write_jsonl

RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
PROCESSES = 2
MICRO_BATCHES = 2
STEPS = 2
LOSS_OF_EQUAL_MODELS = {"sigmoid_norm": math.log(2), "apo_zero": 1}


def launcher(recipe: Path) -> str:
    """What the header's Launch line uses: zero2, a name in configs/accelerate, or none for a single process."""
    header = recipe.read_text().split("\nmodel_name_or_path", 1)[0]
    if named := re.search(r"LAUNCH=(\w+)", header):
        return named[1]
    return "zero2" if re.search(r"^# Launch .*\b(sbatch|accelerate launch)\b", header, re.M) else "none"


def architecture(recipe: Path) -> str:
    """model_type of the shape that the header's plan names."""
    shape = re.search(r"--model_name_or_path (bench/shapes/\S+)", recipe.read_text())
    return json.loads((ROOT / shape[1] / "config.json").read_text())["model_type"] if shape else "none"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, tiny_folder) -> tuple[Path, set[str]]:
    """The folder with a run of each recipe that is tested, and the fields that are overridden. Recipes with the same
    launcher share one set of processes."""
    folder = tmp_path_factory.mktemp("recipes")
    data = write_jsonl(folder / "pairs.jsonl", pairs(32))
    by_launcher: dict[str, list[list[str]]] = {}
    overridden: set[str] = set()
    chosen = {item.callspec.params["recipe"] for item in request.session.items if "runs" in item.fixturenames}
    for recipe in sorted(chosen):
        given = yaml.safe_load(recipe.read_text())
        launch = launcher(recipe)
        batch = given.get("per_device_train_batch_size", 2) * PROCESSES * MICRO_BATCHES
        fields = {
            "model_name_or_path": tiny_folder(architecture(recipe)),
            "model_revision": "main",
            "dataset_name": data,
            "datasets": "",
            "output_dir": folder / recipe.stem,
            "max_steps": STEPS,
            "global_batch_size": batch,
            "bf16": "false",
            "dtype": "float32",
            "dataset_num_proc": 1,
            "report_to": "none",
            "preflight": "skip",
            "torch_compile_backend": "eager" if given.get("torch_compile") else None,
        }
        overridden.update(fields)
        by_launcher.setdefault(launch, []).append(["--config", str(recipe), *as_options(fields)])
    for launch, argvs in by_launcher.items():
        config = "cpu" if launch == "zero2" else f"cpu_{launch}"
        Place(folder, folder, folder / "hf").start_together([argvs], PROCESSES, config)
    return folder, overridden


def kind(recipe: Path) -> tuple:
    """The same for recipes that differ in numbers and names alone: one of them is trained."""
    given = yaml.safe_load(recipe.read_text())
    choices = {name: str(value) for name, value in given.items() if isinstance(value, bool) or name == "loss_type"}
    return launcher(recipe), architecture(recipe), sorted(given), sorted(choices.items())


TRAINED = [
    recipe
    for i, recipe in enumerate(RECIPES)
    if recipe.stem != "demo" and kind(recipe) not in map(kind, RECIPES[:i])  # the demo: test_commands.py
]
FIRST = {"instruct", "instruct_lora"}  # the others, under ZeRO-3 and FSDP2 as well, in the grid
PARAMETERS = [pytest.param(r, id=r.stem, marks=[] if r.stem in FIRST else [pytest.mark.grid]) for r in TRAINED]


@pytest.mark.parametrize("recipe", PARAMETERS)
def test_recipe_trains_two_steps(runs, recipe):
    folder, overridden = runs
    run = folder / recipe.stem
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "done" and status["step"] == STEPS
    given = yaml.safe_load(recipe.read_text())
    used = yaml.safe_load((run / "resolved_config.yaml").read_text())
    for name, value in given.items():
        if name not in overridden:
            assert used[name] in (value, [value]), name
    losses = [entry["loss"] for entry in logged(run)]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(LOSS_OF_EQUAL_MODELS[used["loss_type"][0]], abs=1e-4)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["world_size"] == PROCESSES
    complete = json.loads((run / f"checkpoint-{STEPS}" / "complete.json").read_text())
    assert complete["launch"].replace("-", "").lower() == launcher(recipe)
    if used["use_peft"]:
        assert (run / "adapter_model.safetensors").is_file()


PLANNED = [recipe for recipe in RECIPES if "# Plan" in recipe.read_text()]


@pytest.mark.grid
@pytest.mark.parametrize("recipe", sampled(PLANNED, 4), ids=lambda recipe: recipe.stem)
def test_computed_line_of_a_header_is_its_plans(recipe, tmp_path, monkeypatch, environment):
    """Memory, hours and disk, as the header's own Plan command says them. GRID=all RECORD=1 writes
    the lines of all recipes."""
    monkeypatch.chdir(ROOT)
    command = re.search(r"^ Plan +python scripts/plan.py (.*)", text(recipe), re.M)[1]
    plan.main([*command.split(), "--json", str(tmp_path / "plan.json")])
    planned = json.loads((tmp_path / "plan.json").read_text())
    launch = planned["launches"][launcher(recipe)]
    assert launch["fits"] in ("yes", "tight")
    computed = (
        f"# Computed   {launch['choice']['bytes'] / 2**30:.1f} GiB on each of {planned['gpu']['count']} "
        f"{planned['gpu']['name']}, {planned['time']['hours']:.1f} hours, "
        f"{planned['checkpoints'] * launch['checkpoint'] / 1e9:.0f} GB of disk\n"
    )
    if os.environ.get("RECORD"):
        old = re.sub(r"^# Computed .*\n", "", recipe.read_text(), flags=re.M)
        recipe.write_text(re.sub(r"^(?=# Prefetch)", computed, old, count=1, flags=re.M))
    assert computed in recipe.read_text(), "GRID=all RECORD=1 writes it, and those of the other recipes"


@pytest.mark.grid
def test_plan_on_its_page_is_the_output(monkeypatch, capsys, environment):
    """RECORD=1 writes it."""
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs/memory-and-speed.md"
    shown = re.search(r"^```\npython scripts/plan.py ([^`]+)```\n\n```\n([^`]+)```", page.read_text(), re.M)
    plan.main(shown[1].replace("\\\n", "").split())
    printed = capsys.readouterr().out
    if os.environ.get("RECORD"):
        page.write_text(page.read_text().replace(shown[2], printed))
    assert printed in page.read_text(), "RECORD=1 writes it"
