"""Order of the pairs: equal counts in every micro-batch, the same steps for any number of ranks, what is trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.trainer_pt_utils import BatchRebalanceSampler

import train_dpo
from bench.lengths import sample_lengths
from sfm_dpo.common.files import PROJECT
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.sampler import PairSampler, assign_pairs
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.loading import meta_model
from tests.toolbox import logged, on_cpu, pairs, write_jsonl

STRATEGIES = ["random", "batch_rebalance"]
LAYOUTS = [(True, True), (True, False), (False, False)]  # packed, shared
TOKENS = np.exp(np.random.default_rng(0).normal(5.6, 0.9, (3, 4100)))
LENGTHS = Lengths(*TOKENS.clip(8, 2048).astype(int))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20), st.integers(1, 6))
@settings(derandomize=True, deadline=None, database=None)
def test_assignment_keeps_every_pair_and_fills_every_micro_batch(tokens, size):
    tokens = np.array(tokens * size)
    steps = np.array([tokens, tokens[::-1]])
    for cost, assigned in zip(steps, assign_pairs(steps, size), strict=True):
        assert assigned.shape == (len(tokens) // size, size)
        assert sorted(assigned.ravel().tolist()) == list(range(len(tokens)))
        weights = cost[assigned].sum(axis=1).tolist()
        assert weights == sorted(weights, reverse=True)


def test_ranks_wait_little_for_the_slowest():
    """4 ranks x 4 pairs, Dolci-Think's lengths, FLOPs of GPT-NeoX and OLMo 3; stock is transformers' sampler."""
    lengths = Lengths(**sample_lengths("think", 5120)).truncate(8192, 4096)
    sampler = PairSampler(lengths, "batch_rebalance", 128, 4, 42)
    balanced = sampler.micro_batches(sampler.steps(0)).reshape(-1, 4)
    of_ranks = [BatchRebalanceSampler(lengths.computed(False).tolist(), 128, 4, 8, rank=rank) for rank in range(4)]
    stock = [rows for together in zip(*of_ranks, strict=True) for rows in together]
    for name in ("gpt_neox_6.9b", "olmo3_7b"):
        forward = ForwardFlops.of(meta_model(AutoConfig.from_pretrained(PROJECT / "bench/shapes" / name)))
        waits = []  # FLOPs of the slowest rank over those of the mean one
        for batches in (balanced, stock):
            work = [forward(torch.from_numpy(lengths.sequences[rows].ravel()), 0) for rows in batches]
            together = np.array(work, dtype=float).reshape(-1, 4)  # accelerate gives batch i to rank i mod 4
            waits.append(together.max(axis=1).sum() / together.mean(axis=1).sum())
        assert waits[0] <= 1.01 and waits[1] > 1.15


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_order_depends_on_seed_epoch_data_and_global_batch_alone(strategy):
    def order(seed=3, micro_batch=4, epochs=(0, 1), layout=LAYOUTS[0]) -> list[str]:
        sampler = PairSampler(LENGTHS, strategy, 128, micro_batch, seed, *layout)
        return [sampler.fingerprint(epoch) for epoch in epochs]

    torch.rand(7)
    assert order() == order(micro_batch=1) == order(micro_batch=16)
    assert order() == order(layout=LAYOUTS[1]) == order(layout=LAYOUTS[2])
    assert order(epochs=(1, 0)) == order()[::-1]
    assert len({*order(), *order(seed=4)}) == 4
    for micro_batch in (1, 4):
        sampler = PairSampler(LENGTHS, strategy, 128, micro_batch, 3, packed=False)
        rows = np.split(np.array(list(sampler)), 32)
        assert [sorted(step) for step in rows] == [sorted(step) for step in sampler.steps(0)]


def test_a_tail_is_another_one_each_epoch():
    sampler = PairSampler(LENGTHS, "random", 128, 4, seed=0)
    assert len(sampler) == 4096 == len(set(sampler))
    epochs = [set(sampler.steps(epoch).ravel().tolist()) for epoch in range(2)]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_largest_micro_batch_is_in_the_first_steps(strategy, size, layout):
    sampler = PairSampler(LENGTHS, strategy, 128, size, 1, *layout)
    largest = sampler.layout.count(sampler.micro_batches(sampler.steps(0))).max(axis=1)
    assert max(largest) in largest[:15] and len(largest) == 32
    assert max(largest) == sampler.layout.count(sampler.largest_micro_batch(size))


def train(tmp_path: Path, tiny_folder, *fields: str) -> Path:
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs(27))
    out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    argv = on_cpu(tiny_folder("llama"), data, out, global_batch_size=8, learning_rate=1e-3, seed=3, save_strategy="no")
    assert train_dpo.main([*argv, *fields]) == 0
    return out


@pytest.mark.usefixtures("no_report")
@pytest.mark.slow
def test_what_is_written_is_what_was_trained_on(tmp_path, tiny_folder, monkeypatch, capsys):
    """Rows that the trainer's loss saw, found by their tokens."""
    micro_batches = []
    trainers = []
    compute_loss = train_dpo.SFMDPOTrainer._compute_loss

    def recording(self, model, inputs, return_outputs):
        grid = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ids = [tuple(row[mask.bool()].tolist()) for row, mask in grid]
        rows = {tuple(row["prompt_ids"] + row["chosen_ids"])[:96]: i for i, row in enumerate(self.train_dataset)}
        micro_batches.append([rows[chosen] for chosen in ids[: len(ids) // 2]])
        trainers.append(self)
        return compute_loss(self, model, inputs, return_outputs)

    monkeypatch.setattr(train_dpo.SFMDPOTrainer, "_compute_loss", recording)
    out = train(tmp_path, tiny_folder, "--train_sampling_strategy", "batch_rebalance", "--num_train_epochs", "2")
    sampler = trainers[0].train_sampler
    steps = [sorted(np.concatenate(micro_batches[i : i + 4]).tolist()) for i in range(0, len(micro_batches), 4)]
    assert steps == [sorted(rows.tolist()) for epoch in range(2) for rows in sampler.steps(epoch)]
    assert all(len(rows) == 2 for rows in micro_batches)
    order = json.loads((out / "data.json").read_text())["order"]
    assert order == [sampler.fingerprint(0), sampler.fingerprint(1)]
    assert "3 pairs of an epoch do not fill a last batch of 8 and are left out" in capsys.readouterr().out


@pytest.mark.usefixtures("no_report")
@pytest.mark.slow
def test_full_determinism_gives_bitwise_equal_runs(tmp_path, tiny_folder):
    """Padding-free, cached reference, balanced batches, a worker: metrics and weights bit by bit."""
    fields = "--full_determinism true --padding_free true --precompute_ref_log_probs true"
    fields += " --dataloader_num_workers 1 --train_sampling_strategy batch_rebalance"
    try:
        runs = [train(tmp_path, tiny_folder, *fields.split()) for _ in range(2)]
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    logs = [logged(run) for run in runs]
    assert len(logs[0]) == 3 and logs[0] == logs[1]
    assert (runs[0] / "model.safetensors").read_bytes() == (runs[1] / "model.safetensors").read_bytes()
