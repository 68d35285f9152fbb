"""Compute nodes without a network: a cached model, and W&B offline. What is missing in a model: test_train.py."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Place

MODEL = "somebody/tiny-model"


@pytest.fixture(scope="module")
def cached(place, tmp_path_factory) -> Place:
    """A cache as scripts/prefetch.py leaves it on the login node: a repository of several shards, by its Hub id."""
    folder: Path = tmp_path_factory.mktemp("offline")
    shutil.copy(place.folder / "pairs.jsonl", folder)
    repo = folder / "hf" / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    AutoModelForCausalLM.from_pretrained(place.model).save_pretrained(snapshot, max_shard_size="200KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(place.model / name, snapshot)
    assert len(list(snapshot.glob("*.safetensors"))) > 1
    return Place(folder, MODEL, folder / "hf")


def test_stops_and_resumes_offline_and_w_and_b_has_one_run(cached):
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(cached.folder), "WANDB_SILENT": "true"}
    cached.start("run", report_to="wandb", env=env).stop_at(3)
    run = cached.start("run", report_to="wandb", env=env).finish()
    wandb_id = json.loads((run.folder / "environment.json").read_text())["wandb_run_id"]
    folders = sorted((cached.folder / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in folders] == [wandb_id] * 2
