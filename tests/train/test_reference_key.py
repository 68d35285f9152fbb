"""The key of the reference cache: what changes the log-probs computes anew, what does not reuses the shards."""

import json
import shutil
from pathlib import Path

import pytest

import train_dpo
from sfm_dpo.train import reference_cache
from tests.e2e.runs import pairs


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "sfm_dpo" / "reference"


@pytest.fixture
def train(tmp_path, write_rows):
    """A function: model folder, fields -> trains a step."""
    rows, runs = write_rows("pairs.jsonl", pairs(8)), iter(range(99))

    def run(model: Path, *fields: str) -> None:
        argv = f"--model_name_or_path {model} --dataset_name {rows} --output_dir {tmp_path}/{next(runs)} --max_steps 1"
        argv += (
            " --global_batch_size 4 --per_device_train_batch_size 2 --max_length 96 --precompute_ref_log_probs true"
        )
        argv += " --use_cpu --padding_free true --save_strategy no --preflight skip --guard skip --dataset_num_proc 1"
        assert train_dpo.main([*argv.split(), *fields]) == 0

    return run


def edited(folder: Path, target: Path, **fields) -> Path:
    """The model with the same weights and another config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.slow
def test_the_models_configuration_is_in_the_key(tmp_path, tiny_folder, cache, train):
    model = tiny_folder("olmo3")
    rope = json.loads((model / "config.json").read_text())["rope_parameters"]
    rope["full_attention"] = rope["sliding_attention"]  # YaRN lost
    train(model)
    for n, fields in enumerate(({"sliding_window": 16}, {"rms_norm_eps": 1e-3}, {"rope_parameters": rope}), start=2):
        train(edited(model, tmp_path / f"model-{n}", **fields))
        assert len(list(cache.iterdir())) == n, fields
    train(model, "--model_init_kwargs", '{"sliding_window": 32}')
    assert len(list(cache.iterdir())) == 5
    train(edited(model, tmp_path / "same", transformers_version="0.0", use_cache=False))
    assert len(list(cache.iterdir())) == 5, "a path, a version or the KV cache changes no log-prob"


@pytest.mark.slow
def test_prefix_sharing_is_in_the_key(tiny_folder, cache, train):
    """Another row means other rounding in 16 bit; what is off leaves the key as it was before the field existed."""
    train(tiny_folder("llama"))
    train(tiny_folder("llama"), "--prefix_sharing", "true")
    assert len(list(cache.iterdir())) == 1
    train(tiny_folder("llama"), "--prefix_sharing", "false")
    assert len(list(cache.iterdir())) == 2


@pytest.mark.slow
def test_an_adapters_random_start_is_not_in_the_key(tiny_folder, cache, train):
    lora = ["--use_peft", "true", "--lora_target_modules", "q_proj"]
    train(tiny_folder("llama"), *lora)
    train(tiny_folder("llama"), *lora, "--seed", "5", "--lora_r", "4")
    assert len(list(cache.iterdir())) == 1
