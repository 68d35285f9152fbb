"""The divergence study, replayed with real runs of a tiny model: each confirmed cause makes its kind of difference,
and compare_runs.py names it.

In bf16, as the study's runs: in fp32 the same causes move a few last bits, most of which a mean over the batch hides.
The learning rate is small: Adam's first update is as large as it for any gradient, and turns last bits into more.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

import train_dpo
from sfm_dpo.compare import parity
from sfm_dpo.compare.runs import compare_runs
from sfm_dpo.config import parse_config
from sfm_dpo.run.reader import read_log
from sfm_dpo.train import reference_cache

pytestmark = [pytest.mark.slow, pytest.mark.grid]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "model").symlink_to(tiny_folder("llama"))
    rng = np.random.default_rng(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for i in range(256):  # shards of the cache hold a 64th of the pairs, so batches of 4
            good, bad = ("ab" * int(n) for n in rng.integers(2, 20, 2))
            # A batch without padding needs no mask, and takes another kernel: half of the pairs have equal sides
            bad = "c" * len(good) if i % 2 else bad + "c"
            file.write(json.dumps({"prompt": f"q{i:03}", "chosen": good, "rejected": bad}) + "\n")
    return folder


@pytest.fixture
def train(place, monkeypatch):
    """A function: (name, cache folder, fields) -> the run, trained for three steps unless it is there."""

    def parse_bf16(argv: list[str]):
        config = parse_config(argv)
        config.train.bf16, config.train.mixed_precision = True, "bf16"  # on CPU the field is refused for its pace
        return config

    monkeypatch.setattr(train_dpo, "parse_config", parse_bf16)

    def run(name: str, cache: str, *fields: str) -> Path:
        out = place / name.replace(" ", "-")
        if not (out / "status.json").exists():
            monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(place / cache))
            argv = f"--model_name_or_path {place / 'model'} --dataset_name {place / 'pairs.jsonl'} --output_dir {out}"
            argv += " --global_batch_size 8 --per_device_train_batch_size 1 --max_length 96 --max_steps 3"
            argv += " --logging_steps 1 --save_strategy no --learning_rate 1e-5 --precompute_ref_log_probs true"
            argv += " --preflight skip --guard skip --dataset_num_proc 1 --use_cpu --dtype float32"
            assert train_dpo.main([*argv.split(), *fields]) == 0
        return out

    return run


def compare(a: Path, b: Path) -> tuple[dict, bool]:
    """The comparison, and whether the logps differ from step 1 on."""
    result = compare_runs(read_log(a), read_log(b))
    logps = [row["first"] for row in result["metrics"] if row["metric"].startswith("logps/")]
    return result, 1 in logps


def test_the_same_run_twice_is_identical(train):
    result, _ = compare(train("base", "own cache"), train("again", "own cache"))
    assert result["verdict"]["verdict"] == "identical" and not result["suspects"]
    assert result["differences"]["data"] == result["differences"]["reference cache"] == "the same"


def test_a_reference_cache_made_at_another_batch_shape(train):
    """The study's first cause. The key is the same, as it should be: only how the shards were made tells it."""
    train("one step to fill the cache", "cache of 1", "--precompute_ref_batch_size", "1", "--max_steps", "1")
    result, logps_differ = compare(train("base", "own cache"), train("other cache", "cache of 1"))
    first = result["suspects"][0]
    assert first["cause"] == "reference log-probs"
    assert first["why"].count("batches of up to") == 2 and "up to 2,048 tokens" in first["why"]
    loss = next(row for row in result["metrics"] if row["metric"] == "train/loss")
    assert loss["first"] == 1 and not logps_differ  # before the first update the loss alone does
    assert result["verdict"]["verdict"] == "within noise"
    assert list(result["differences"]["reference cache"]) == ["made"]


def test_separate_forwards(train, monkeypatch):
    """The study's second cause: a code base that does not concatenate chosen and rejected, policy and reference."""
    trainer, separately = train_dpo.SFMDPOTrainer, functools.partial(functools.partial, parity.run_separately)
    loss, reference = trainer._compute_loss, trainer.compute_ref_log_probs
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_compute_loss", lambda self, model, *rest: loss(self, separately(model), *rest))
        patch.setattr(trainer, "compute_ref_log_probs", lambda self, model, x: reference(self, separately(model), x))
        apart = train("separate", "no cache", "--precompute_ref_log_probs", "false")
    together = train("concatenated", "no cache", "--precompute_ref_log_probs", "false")
    result, logps_differ = compare(together, apart)
    assert logps_differ
    assert result["differences"]["configuration"] == "the same"
    assert result["suspects"][0]["cause"] == "forward" and "separate forwards" in result["suspects"][0]["why"]


@pytest.mark.parametrize("field", ["--attn_implementation=eager", "--padding_free=true"])
def test_another_attention_path(train, field):
    """The study's third cause."""
    result, logps_differ = compare(train("base", "own cache"), train(field, "own cache", field))
    assert logps_differ
    assert result["suspects"][0]["cause"] == "model implementation"
    assert field.strip("-").split("=")[0] in result["suspects"][0]["why"]
    assert result["verdict"]["verdict"] == "within noise"
    # Rounding of bf16, an order of magnitude below the tolerance of 0.05; a leak between sequences is above it
    assert all(row["relative"] < 0.005 for row in result["metrics"] if row["metric"].startswith("logps/"))
