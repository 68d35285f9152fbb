"""Reference cache: the key covers what changes the figures and nothing else; shards survive damage.

Kills: tests/e2e/test_resume.py.
"""

import json
import math
import multiprocessing
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.numpy import load_file

import train_dpo
from sfm_dpo.train import reference_cache
from tests.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("no_report")


def tokens(rows: int = 40, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    ids = {name: [rng.integers(0, 200, rng.integers(1, 30)).tolist() for _ in range(rows)] for name in ("p", "c", "r")}
    return Dataset.from_dict({"prompt_ids": ids["p"], "chosen_ids": ids["c"], "rejected_ids": ids["r"]})


def test_key_covers_tokens_and_settings():
    def key(data: Dataset, weights: str = "w", max_length: int = 64) -> Path:
        return reference_cache.cache_folder(data, {"weights": weights, "max_length": max_length})

    base, reordered = key(tokens()), tokens().select([1, 0, *range(2, 40)])
    assert base == reference_cache.cache_folder(tokens(), {"max_length": 64, "weights": "w"})
    others = [key(tokens(seed=1)), key(tokens(), weights="v"), key(tokens(), max_length=32), key(reordered)]
    assert len({base, *others, key(tokens().select(range(39)))}) == 6
    one = Dataset.from_dict({"prompt_ids": [[1, 2]], "chosen_ids": [[3]], "rejected_ids": [[4]]})
    moved = Dataset.from_dict({"prompt_ids": [[1]], "chosen_ids": [[2, 3]], "rejected_ids": [[2, 4]]})
    assert key(one) != key(moved)


def make_cache(lengths: np.ndarray, batch_tokens: int = 0) -> reference_cache.ReferenceCache:
    return reference_cache.ReferenceCache(Path("nowhere"), lengths, batch_tokens)


def test_shards_hold_every_row_once_longest_first():
    lengths = np.random.default_rng(0).integers(1, 1000, 1000)
    shards = make_cache(lengths).shards
    assert sorted(np.concatenate(shards).tolist()) == list(range(1000))
    assert (np.diff(lengths[np.concatenate(shards)]) <= 0).all()
    assert len(make_cache(np.ones(100_000, dtype=int)).shards) == -(-100_000 // reference_cache.SHARD_PAIRS)


def test_batches_respect_the_budget_and_keep_all_rows():
    lengths = np.sort(np.random.default_rng(0).integers(1, 500, 300))[::-1].copy()
    cache = make_cache(lengths, 2 * int(lengths.max()))
    parts = cache.batches(np.arange(300))
    assert np.concatenate(parts).tolist() == list(range(300))
    assert all(len(rows) * lengths[rows].max() <= 2 * lengths.max() for rows in parts)
    assert len(parts[0]) == 2 < len(parts[-1])


def compute_all(cache: reference_cache.ReferenceCache, forward) -> bool:
    """All missing shards, without a report or a stop file."""
    return cache.compute(cache.missing_shards(), forward, lambda left, holder: None, lambda: False)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_write_the_shards_of_one(tmp_path, monkeypatch, ranks):
    """Each rank computes its share of every round; rank 0 writes. The ranks take turns here."""
    lengths = np.random.default_rng(0).integers(1, 50, 37)
    logps = torch.arange(74.0).view(37, 2)
    cache = reference_cache.ReferenceCache(tmp_path, lengths, 3 * int(lengths.max()))
    size = math.ceil(len(cache.shards) / ranks) * ranks  # as many shards at a time as there are ranks
    groups = [cache.shards[start : start + ranks] for start in range(0, size, ranks)]
    rounds = []
    for group in groups:
        work = [rows for shard in group for rows in cache.batches(shard)]
        rounds += [work[start : start + ranks] for start in range(0, len(work), ranks)]
    turns = iter(rounds)

    def gather(own: np.ndarray) -> list[np.ndarray]:
        turn = next(turns)
        return [own] + [logps[turn[min(rank, len(turn) - 1)]].numpy() for rank in range(1, ranks)]

    monkeypatch.setattr(reference_cache, "gather", gather)
    monkeypatch.setattr(reference_cache, "world_size", lambda: ranks)
    assert compute_all(cache, lambda rows: logps[rows])
    assert (cache.read_all() == logps.numpy()).all() and not cache.missing_shards()


def compute_slowly(folder: Path, log: Path, lengths: np.ndarray) -> None:
    """A job: writes the rows of each forward into `log`."""

    def forward(rows: np.ndarray) -> torch.Tensor:
        time.sleep(0.02)
        with log.open("a") as file:
            file.write("".join(f"{row}\n" for row in rows))
        return torch.from_numpy(np.stack([rows, lengths[rows]], axis=1))

    cache = reference_cache.ReferenceCache(folder, lengths, int(lengths.max()))
    assert compute_all(cache, forward)


def test_jobs_compute_each_shard_once_between_them_and_take_over_what_a_killed_one_had(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 50, 128)
    folder = tmp_path / "cache"
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    logs = [tmp_path / str(job) for job in range(3)]
    jobs = [fork.Process(target=compute_slowly, args=(folder, log, lengths)) for log in logs]
    for job in jobs:
        job.start()
    while not all(log.exists() for log in logs):
        time.sleep(0.01)
    jobs[0].kill()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [-9, 0, 0]
    cache = reference_cache.ReferenceCache(folder, lengths, int(lengths.max()))
    assert (cache.read_all() == np.stack([np.arange(128), lengths], axis=1)).all()
    for log in logs[1:]:
        rows = log.read_text().split()
        assert rows and len(set(rows)) == len(rows)
    rows = Counter(row for log in logs for row in log.read_text().split())
    assert len(rows) == 128 and rows.total() <= 128 + 2, "only the shard that the killed job had is computed twice"


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "other rows", "nan"])
def test_damaged_shards_are_noticed(tmp_path, damage):
    path, rows = tmp_path / "000000.safetensors", np.arange(4)
    logps = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    if damage == "nan":
        logps[0, 0] = np.nan
    reference_cache.write_shard(path, rows[::-1].copy() if damage == "other rows" else rows, logps)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-3])
    elif damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    assert reference_cache.read_shard(path, rows) is None
    reference_cache.write_shard(path, rows, np.ones((4, 2)))
    assert (reference_cache.read_shard(path, rows) == 1).all()
    assert not list(tmp_path.glob("*.partial"))


# ---- real runs


@pytest.fixture(scope="module")
def model(tiny_folder) -> Path:
    return tiny_folder("llama")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf" / "sfm_dpo" / "reference"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(48):
            good, bad = ("ab cd " * int(rng.integers(1, 12)) + str(i) for _ in range(2))
            file.write(json.dumps({"prompt": f"question {i}", "chosen": good, "rejected": bad + "x"}) + "\n")
    return path


def arguments(model: Path, pairs: Path, out: Path, *extra: str) -> list[str]:
    argv = f"--model_name_or_path {model} --dataset_name {pairs} --output_dir {out} --global_batch_size 8".split()
    argv += "--per_device_train_batch_size 4 --max_length 64 --max_steps 1 --save_strategy no".split()
    argv += "--precompute_ref_log_probs true --report_to none --guard skip".split()
    return [*argv, "--preflight", "skip", *extra]  # random weights find every answer impossible


def train(*args) -> None:
    assert train_dpo.main(arguments(*args)) == 0


def written(cache: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in cache.glob("*/*.safetensors")}


@pytest.mark.slow
def test_cache_is_reused_or_not_as_it_should(model, pairs, cache, tmp_path, monkeypatch):
    train(model, pairs, tmp_path / "a")
    shards = written(cache)
    assert shards
    # Another lr, epoch count, output folder, batch: the same shards, untouched
    same = ("--learning_rate", "1e-4", "--num_train_epochs", "2", "--global_batch_size", "4")
    train(model, pairs, tmp_path / "b", *same)
    assert written(cache) == shards
    # Another micro-batch in a cache of its own: the same bits, for the reference's batch is not training's
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path / "hf-2"))
    train(model, pairs, tmp_path / "two", "--per_device_train_batch_size", "1")
    for path in cache.glob("*/*.safetensors"):
        other = tmp_path / "hf-2/sfm_dpo/reference" / path.relative_to(cache)
        assert (load_file(other)["logps"] == load_file(path)["logps"]).all()
    monkeypatch.setattr(reference_cache, "HF_CACHE_HOME", str(tmp_path / "hf"))
    # What changes the figures computes again
    train(model, pairs, tmp_path / "c", "--max_length", "32")
    train(model, pairs, tmp_path / "d", "--padding_free", "true")
    train(model, pairs, tmp_path / "e", "--attn_implementation", "eager")
    other = tmp_path / "other-model"
    tiny_model("llama", seed=1).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    train(other, pairs, tmp_path / "f")
    assert len(list(cache.iterdir())) == 5
    assert shards.items() <= written(cache).items()


@pytest.mark.slow
def test_damaged_shards_are_computed_again_and_stale_ones_caught_at_step_0(
    model, pairs, cache, tmp_path, capsys, monkeypatch
):
    trainers = []
    original = train_dpo.SFMDPOTrainer.train
    monkeypatch.setattr(
        train_dpo.SFMDPOTrainer, "train", lambda self, **kw: (trainers.append(self), original(self, **kw))[1]
    )
    train(model, pairs, tmp_path / "a", "--eval_fraction", "0.25")
    assert trainers[0].ref_model is None  # not in memory beside the policy
    assert np.isfinite(trainers[0].train_dataset["ref_chosen_logps"]).all()
    assert len(list(cache.iterdir())) == 2  # a folder a split
    shards = written(cache)
    victim = Path(min(shards))
    before = load_file(victim)
    victim.write_bytes(victim.read_bytes()[:-1])
    train(model, pairs, tmp_path / "b", "--eval_fraction", "0.25")
    now = written(cache)
    assert {path for path in shards if now[path] != shards[path]} == {str(victim)}
    np.testing.assert_allclose(load_file(victim)["logps"], before["logps"], atol=1e-5)

    for path in map(Path, now):
        data = load_file(path)
        reference_cache.write_shard(path, data["rows"], data["logps"] - 3.0 * np.array([1, -1]))
    assert train_dpo.main(arguments(model, pairs, tmp_path / "c", "--eval_fraction", "0.25")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "step 0" in error and "are not those of the model that is trained" in error
