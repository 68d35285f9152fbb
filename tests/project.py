"""The project as a user has it, in a folder with a space in its name: tiny recipes, the Hub's names as folders."""

import json
import os
import shutil
from pathlib import Path

import yaml

from tests.tiny_models import tiny_model, tiny_tokenizer

SOURCE = Path(__file__).resolve().parents[1]
# What a tiny run on CPU has to change in a recipe: 16 pairs in 4 steps, which must move the model.
SMALL = {
    "max_length": 96,
    "max_prompt_length": 48,
    "global_batch_size": 4,
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "dataset_num_proc": 1,
    "bf16": False,
    "report_to": "none",
    "preflight": "warn",  # random weights find every answer impossible
    "guard": "warn",
}


def make_project(folder: Path) -> Path:
    """A copy of the project whose recipes train a tiny model on 16 pairs."""
    project = folder / "my project"
    for name in ("scripts", "recipes", "configs", "sfm_dpo", "bench", "data"):
        shutil.copytree(SOURCE / name, project / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in ("train_dpo.py", "accelerate_config.yaml", "ds_config.json"):
        shutil.copy(SOURCE / file, project)
    for name in ("logs", "outputs", "pairs"):
        (project / name).mkdir()
    tiny_model("llama", num_hidden_layers=1).save_pretrained(project / "tiny model")
    tiny_tokenizer().save_pretrained(project / "tiny model")
    rows = [
        {
            "prompt": f"What is {a} and {b}?",
            "chosen": [{"role": "assistant", "content": f"{a + b}."}],
            "rejected": [{"role": "assistant", "content": f"Well, that depends on {a}, and on {b} as well."}],
        }
        for a in range(4)
        for b in range(4)
    ]
    (project / "pairs" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for recipe in (project / "recipes").glob("*.yaml"):
        fields = yaml.safe_load(recipe.read_text())
        if fields.pop("datasets", None):  # a mixture
            fields["dataset_name"] = "mixture"
        for field, target in (("model_name_or_path", "tiny model"), ("dataset_name", "pairs")):
            link(project, fields[field], target)
        recipe.write_text(yaml.safe_dump(fields | SMALL))
    return project


def link(project: Path, name: str, target: str) -> None:
    """Makes `name`, an id on the Hub or a path, the folder `target` of the project."""
    path = project / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(project / target, path.parent))  # also right in a copy of the project
