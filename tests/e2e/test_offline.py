"""Compute nodes without a network: a cached model, W&B offline, and what is missing is said before a model loads."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Place
from tests.toolbox import error_line

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


def test_a_shard_that_is_missing_is_named_before_the_model_is_loaded(cached, train_here, tmp_path, monkeypatch):
    """In this process, which is offline as well. More that can be missing: test_train.py."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(cached.hf_home / "hub", tmp_path / "hub")
    for path in tmp_path.glob("hub/models--*/snapshots/*/*-00002-of-*"):
        path.unlink()
    run = train_here("shard-missing", 2, model_name_or_path=MODEL, output_dir=tmp_path / "run")
    line = error_line(run.log)
    assert f"model_name_or_path {MODEL}: " in line and "00002-of-" in line and "Loading weights" not in run.log
