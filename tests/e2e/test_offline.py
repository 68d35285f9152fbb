"""Compute nodes without a network: a cached model, W&B offline, and what is missing is said before a model loads."""

import json
import re
import shutil
from pathlib import Path

import pytest

import train_dpo
from sfm_dpo.compare.run_log import read_log
from sfm_dpo.run.checkpoint import STOP
from tests.e2e.runs import Place, as_options

MODEL = "somebody/tiny-model"


@pytest.fixture(scope="module")
def cached(place, tmp_path_factory) -> Place:
    """A cache as scripts/prefetch.py leaves it on the login node: a repository of several shards, by its Hub id."""
    from transformers import AutoModelForCausalLM

    folder: Path = tmp_path_factory.mktemp("offline")
    shutil.copy(place.folder / "pairs.jsonl", folder)
    repo = folder / "hf" / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(snapshot.name)
    AutoModelForCausalLM.from_pretrained(place.model).save_pretrained(snapshot, max_shard_size="200KB")
    for file in (place.model / "tokenizer.json", place.model / "tokenizer_config.json"):
        shutil.copy(file, snapshot)
    shutil.copy(place.model / "chat_template.jinja", snapshot)
    assert len(list(snapshot.glob("*.safetensors"))) > 1
    return Place(folder, MODEL, folder / "hf")


def test_stops_and_goes_on_offline_and_w_and_b_has_one_run(cached):
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(cached.folder), "WANDB_SILENT": "true"}
    run = cached.start("run", report_to="wandb", env=env)
    assert run.until_step(3)
    (run.folder / STOP).touch()
    assert run.wait() == 75, run.log[-4000:]
    again = cached.start("run", report_to="wandb", env=env).finish()
    assert "tracking: wandb" in again.log
    wandb_id = json.loads((run.folder / "environment.json").read_text())["wandb_run_id"]
    folders = sorted(p.name for p in (cached.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2, folders
    assert [re.sub(r"offline-run-\d+_\d+-", "", name) for name in folders] == [wandb_id] * 2
    # both starts together hold every step with its figures, once, and the configuration
    logs = [read_log(cached.folder / "wandb" / name) for name in folders]
    assert not set(logs[0].steps) & set(logs[1].steps)
    mine, theirs = read_log(run.folder).steps, logs[0].steps | logs[1].steps
    assert set(theirs) == set(mine)
    assert all(theirs[step]["train/loss"] == mine[step]["train/loss"] for step in mine if "train/loss" in mine[step])
    assert all(log.config["learning_rate"] == 1e-3 and log.config["beta"] == 5 for log in logs)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("snapshots/*/*-00002-of-*", "00002-of-"),
        (
            "snapshots/*/*.safetensors*",
            "lacks weights (*.safetensors); run scripts/prefetch.py where there is a network",
        ),
        ("*/*", "neither a folder with a model nor one that the Hub gives"),
    ],
)
def test_what_is_missing_is_named_before_the_model_is_loaded(cached, tmp_path, monkeypatch, capsys, missing, message):
    """In this process, which is offline as well (tests/conftest.py)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(cached.hf_home / "hub", tmp_path / "hub")
    for path in list(tmp_path.glob(f"hub/models--*/{missing}")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert train_dpo.main([*as_options(cached.values("missing", output_dir=tmp_path / "run")), "--use_cpu"]) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"model_name_or_path {MODEL}: " in errors[0] and message in errors[0], captured.err
    assert "Traceback" not in captured.err and "Loading weights" not in captured.err + captured.out
