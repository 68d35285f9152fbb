"""The project as a user has it, with a tiny model and pairs, and what a tiny job has to change."""

import json
import shutil
import sys
import time
from pathlib import Path

from tests.tiny_models import tiny_model, tiny_tokenizer

SOURCE = Path(__file__).resolve().parents[2]
CPU = {"LAUNCH": "cpu", "VENV": sys.prefix, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
CPU |= {"SKIP_HEALTHCHECK": "1"}  # seconds a start; the tests of it leave it on


def make_project(folder: Path) -> Path:
    """A copy of the project in a folder with a space in its name, with a tiny model and a preference file."""
    project = folder / "my project"
    for folder in ("scripts", "recipes", "configs", "sfm_dpo"):
        shutil.copytree(SOURCE / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train_dpo.py", "accelerate_config.yaml", "ds_config.json"):
        shutil.copy(SOURCE / file, project)
    for folder in ("logs", "outputs"):
        (project / folder).mkdir()
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
    (project / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return project


def overrides(**fields) -> list[str]:
    """The recipe's fields that a tiny run on CPU has to change: 16 pairs in 4 steps, which must move the model."""
    small = {
        "model_name_or_path": "tiny model",
        "dataset_name": "pairs.jsonl",
        "max_length": 96,
        "max_prompt_length": 48,
        "global_batch_size": 4,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "dataset_num_proc": 1,
        "bf16": "false",
        "report_to": "none",
        "preflight": "warn",  # random weights find every answer impossible
        "guard": "warn",
    }
    return [arg for key, value in (small | fields).items() for arg in (f"--{key}", str(value))]


def log_of(project: Path, job: str, name: str = "dpo-train") -> str:
    return (project / f"logs/{name}-{job}.out").read_text()


def wait_for(condition, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
