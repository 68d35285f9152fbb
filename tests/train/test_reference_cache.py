"""Reference cache: the key covers what changes the log-probs and nothing else; shards survive damage."""

import json
import multiprocessing
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from peft import LoraConfig
from safetensors.numpy import load_file

from sfm_dpo.common.errors import UserError
from sfm_dpo.train import reference_cache
from sfm_dpo.train.base_model import BaseModel
from tests.tiny_models import tiny_model
from tests.toolbox import as_options, edit
from tests.train.test_trainer import make_trainer, pairs


def tokens(rows: int = 40, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    ids = {name: [rng.integers(0, 200, rng.integers(1, 30)).tolist() for _ in range(rows)] for name in ("p", "c", "r")}
    return Dataset.from_dict({"prompt_ids": ids["p"], "chosen_ids": ids["c"], "rejected_ids": ids["r"]})


def test_key_covers_tokens_and_settings():
    def key(data: Dataset, weights: str = "w", max_length: int = 64) -> Path:
        return reference_cache.cache_folder(data, {"weights": weights, "max_length": max_length})

    base = key(tokens())
    assert base == reference_cache.cache_folder(tokens(), {"max_length": 64, "weights": "w"})
    others = [key(tokens(seed=1)), key(tokens(), weights="v"), key(tokens(), max_length=32)]
    others += [key(tokens().select([1, 0, *range(2, 40)])), key(tokens().select(range(39)))]
    assert len({base, *others}) == 6
    one = Dataset.from_dict({"prompt_ids": [[1, 2]], "chosen_ids": [[3]], "rejected_ids": [[4]]})
    moved = Dataset.from_dict({"prompt_ids": [[1]], "chosen_ids": [[2, 3]], "rejected_ids": [[2, 4]]})
    assert key(one) != key(moved)


def test_shards_hold_every_row_once_longest_first_and_batches_respect_the_budget():
    lengths = np.sort(np.random.default_rng(0).integers(1, 500, 300))[::-1].copy()
    cache = reference_cache.ReferenceCache(Path("nowhere"), lengths, 2 * int(lengths.max()), 8 * int(lengths.max()))
    rows = np.concatenate(cache.shards)
    assert sorted(rows.tolist()) == list(range(300)) and (np.diff(lengths[rows]) <= 0).all()
    sizes = [int(lengths[shard].sum()) for shard in cache.shards]
    assert all(abs(size - 8 * lengths.max()) <= lengths.max() for size in sizes[:-1]) and len(sizes) > 5
    parts = cache.batches(np.arange(300))
    assert np.concatenate(parts).tolist() == list(range(300))
    assert all(len(rows) * lengths[rows].max() <= 2 * lengths.max() for rows in parts)
    assert len(parts[0]) == 2 < len(parts[-1])


def compute_slowly(folder: Path, log: Path, lengths: np.ndarray) -> None:
    """A job: writes the rows of each forward into `log`."""

    def forward(rows: np.ndarray) -> torch.Tensor:
        time.sleep(0.02)
        with log.open("a") as file:
            file.write("".join(f"{row}\n" for row in rows))
        return torch.from_numpy(np.stack([rows, lengths[rows]], axis=1))

    cache = reference_cache.ReferenceCache(folder, lengths, int(lengths.max()), 2 * int(lengths.max()))
    cache.compute(cache.missing_shards(), forward, lambda done, total, owner: None)


def test_one_job_computes_the_others_wait_and_one_takes_over_from_a_killed_one(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 50, 128)
    folder = tmp_path / "cache"
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    logs = [tmp_path / str(job) for job in range(3)]
    jobs = [fork.Process(target=compute_slowly, args=(folder, log, lengths)) for log in logs]
    for job in jobs:
        job.start()
    while not any(folder.glob("*.safetensors")):
        time.sleep(0.01)
    [owner] = [number for number, log in enumerate(logs) if log.exists()]
    jobs[owner].kill()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [-9 if number == owner else 0 for number in range(3)]
    cache = reference_cache.ReferenceCache(folder, lengths, int(lengths.max()), 2 * int(lengths.max()))
    assert (cache.read_all() == np.stack([np.arange(128), lengths], axis=1)).all()
    assert [log.exists() for log in logs].count(True) == 2, "the killed job and the one that took over"
    most = max(map(len, cache.shards))
    rows = Counter(row for log in logs if log.exists() for row in log.read_text().split())
    assert len(rows) == 128 and rows.total() <= 128 + most, "only the shard that the killed job had is computed twice"


@pytest.mark.parametrize("damage", ["truncate", "flip", "other rows"])
def test_damaged_shards_are_noticed(tmp_path, damage):
    path = tmp_path / "000000.safetensors"
    rows = np.arange(4)
    logps = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    reference_cache.write_shard(path, rows[::-1].copy() if damage == "other rows" else rows, logps)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-3])
    elif damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    assert reference_cache.read_shard(path, rows) is None
    reference_cache.write_shard(path, rows, np.ones((4, 2)))
    assert (reference_cache.read_shard(path, rows) == 1).all()
    assert not list(tmp_path.glob("*.partial"))


def test_a_log_prob_that_is_not_finite_is_computed_again_alone_and_then_refused(tmp_path):
    bad = {1: lambda rows: len(rows) > 1, 130: lambda rows: True}

    def score(rows: np.ndarray) -> torch.Tensor:
        return torch.tensor([[torch.nan if bad.get(row, len)(rows) is True else row, 1.0] for row in rows])

    cache = reference_cache.ReferenceCache(tmp_path, np.full(256, 8), 32, 32)
    with pytest.raises(reference_cache.NotFinite) as caught:
        cache.compute(cache.missing_shards(), score, lambda done, total, owner: None)
    assert caught.value.status == {"pair": 130}
    assert cache.missing_shards() == list(range(130 // 4, 64)) and not cache.lease.path.exists()
    assert cache.read(0)[:, 0].tolist() == [0, 1, 2, 3]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "sfm_dpo" / "reference"


@pytest.fixture
def fill(tmp_path, cache):
    """A function: model folder, LoRA, fields -> number of the caches after the reference pass."""

    def run(model: Path, peft: LoraConfig | None = None, **fields) -> int:
        fields = {"precompute_ref_log_probs": "true"} | fields
        make_trainer(model, tmp_path / "run", *as_options(fields), peft=peft)
        return len(list(cache.iterdir()))

    return run


def written(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.glob("*/*.safetensors")}


def test_the_same_shards_whatever_is_about_training_alone(tiny_folder, cache, fill, tmp_path, monkeypatch):
    model = tiny_folder("llama")
    fill(model)
    shards = written(cache)
    assert fill(model, learning_rate=1e-4, num_train_epochs=2, per_device_train_batch_size=2) == 1
    assert shards and written(cache) == shards
    assert fill(model, attn_implementation="eager") == 2
    # another micro-batch in a cache of its own: the same bits, for the reference's batch is not training's
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path / "hf-2"))
    fill(model, per_device_train_batch_size=1)
    for path in shards:
        other = tmp_path / "hf-2/sfm_dpo/reference" / path.relative_to(cache)
        assert (load_file(other)["logps"] == load_file(path)["logps"]).all()


def edited(folder: Path, target: Path, **fields) -> Path:
    """The model with the same weights and another config.json."""
    shutil.copytree(folder, target)
    edit(target / "config.json", **fields)
    return target


def test_what_is_in_the_key(tmp_path, tiny_folder, fill):
    """Not a path, a version, the KV cache, or sharing where it was on by itself; another row rounds otherwise."""
    model = tiny_folder("olmo3")
    rope = json.loads((model / "config.json").read_text())["rope_parameters"]
    rope["full_attention"] = rope["sliding_attention"]  # YaRN lost
    packed = {"padding_free": "true"}
    assert fill(model, **packed) == 1
    edits = {"a": {"sliding_window": 16}, "b": {"rms_norm_eps": 1e-3}, "c": {"rope_parameters": rope}}
    for count, (name, fields) in enumerate(edits.items(), start=2):
        assert fill(edited(model, tmp_path / name, **fields), **packed) == count, fields
    assert fill(edited(model, tmp_path / "same", transformers_version="0.0", use_cache=False), **packed) == 4
    assert fill(model, **packed, prefix_sharing="true") == 4
    assert fill(model, **packed, prefix_sharing="false") == 5
    assert fill(model, padding_free="false") == 6
    assert fill(model, **packed, max_length=32) == 7
    other = edited(model, tmp_path / "other")
    tiny_model("olmo3", seed=1).save_pretrained(other)
    assert fill(other, **packed) == 8


def test_an_adapters_random_start_is_not_in_the_key(tiny_folder, fill):
    for size in (4, 8):
        assert fill(tiny_folder("llama"), LoraConfig(r=size, target_modules=["q_proj"])) == 1


def test_damaged_shards_are_computed_again_and_stale_ones_caught_at_step_0(tiny_folder, cache, fill, tmp_path):
    fill(tiny_folder("llama"))
    shards = written(cache)
    victim = min(shards)
    before = load_file(victim)
    victim.write_bytes(victim.read_bytes()[:-1])
    fill(tiny_folder("llama"))
    now = written(cache)
    assert {path for path in shards if now[path] != shards[path]} == {victim}
    np.testing.assert_allclose(load_file(victim)["logps"], before["logps"], atol=1e-5)

    for path in now:
        stored = load_file(path)
        reference_cache.write_shard(path, stored["rows"], stored["logps"] - 3.0 * np.array([1, -1]))
    trainer = make_trainer(tiny_folder("llama"), tmp_path / "run", "--precompute_ref_log_probs=true")
    with pytest.raises(UserError, match=r"step 0.*are not those of the trained model"):
        trainer.train()


def test_a_pair_without_a_finite_reference_is_named(tiny_folder, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(BaseModel, "score", lambda self, data, rows, **by: torch.full((len(rows), 2), torch.nan))
    origins = {"source": ["p.jsonl"] * 8, "row": list(range(1, 9))}
    data = concatenate_datasets([pairs(), Dataset.from_dict(origins)], axis=1)
    with pytest.raises(UserError, match=r"^p.jsonl: row 3: the reference's log-probs .* not finite; remove that row"):
        make_trainer(tiny_folder("llama"), tmp_path / "run", "--precompute_ref_log_probs=true", data=data)


def test_a_folder_that_cannot_be_made_is_one_line():
    with pytest.raises(UserError, match=r"^HF_HOME: /proc/nope: cannot be made: .*; set HF_HOME"):
        reference_cache.make_cache_folder(Path("/proc/nope"))
