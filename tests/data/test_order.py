"""Determinism: the order of the data is a function of seed, epoch and dataset; full_determinism gives equal runs."""

import json
from pathlib import Path

import pytest
import torch

import train_dpo
from sfm_dpo.config import parse_config
from sfm_dpo.data.sampler import epoch_order, fingerprint
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.train.trainer import SFMDPOTrainer
from tests.e2e.runs import pairs

STRATEGIES = ["random", "group_by_length", "batch_rebalance"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    folder = tmp_path_factory.mktemp("order")
    (folder / "model").symlink_to(tiny_folder("llama"))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(24)))
    return folder


def train(place: Path, name: str, *fields: str) -> Path:
    out = place / name
    argv = f"--model_name_or_path {place / 'model'} --dataset_name {place / 'pairs.jsonl'} --output_dir {out} --seed 3"
    argv += " --global_batch_size 8 --per_device_train_batch_size 2 --max_length 96 --learning_rate 1e-3 --use_cpu"
    argv += " --logging_steps 1 --save_strategy no --preflight skip --guard skip --dataset_num_proc 1"
    assert train_dpo.main([*argv.split(), *fields]) == 0
    return out


@pytest.fixture
def consumed(monkeypatch) -> list[list[int]]:
    """Rows of every micro-batch that the trainer's loss saw, found by their tokens."""
    seen: list[list[int]] = []
    original = train_dpo.SFMDPOTrainer._compute_loss

    def recording(self, model, inputs, return_outputs):
        if self.model.training:
            grid = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
            ids = [tuple(row[mask.bool()].tolist()) for row, mask in grid]
            rows = {tuple(row["prompt_ids"] + row["chosen_ids"])[:96]: i for i, row in enumerate(self.train_dataset)}
            seen.append([rows[chosen] for chosen in ids[: len(ids) // 2]])
        return original(self, model, inputs, return_outputs)

    monkeypatch.setattr(train_dpo.SFMDPOTrainer, "_compute_loss", recording)
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_is_what_was_trained_on(place, consumed, strategy):
    out = train(place, f"written-{strategy}", "--train_sampling_strategy", strategy, "--num_train_epochs", "2")
    steps = [
        sorted(row for rows in consumed[i : i + 4] for row in rows) for i in range(0, len(consumed), 4)
    ]  # accumulation over 4
    assert len(steps) == 6
    order = json.loads((out / "data.json").read_text())["order"]
    assert order == [fingerprint(steps[:3]), fingerprint(steps[3:])]
    assert order[0] != order[1]  # each epoch has its own


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_order_is_a_function_of_seed_and_epoch(place, tmp_path, strategy):
    """Whatever drew random numbers before, and in whichever epoch a resumed process begins."""

    def orders(*fields: str) -> list[str]:
        argv = f"--model_name_or_path {place / 'model'} --dataset_name {place / 'pairs.jsonl'} --output_dir {tmp_path}"
        argv += " --seed 3 --global_batch_size 8 --per_device_train_batch_size 2 --max_length 96 --use_cpu"
        config = parse_config([*argv.split(), "--train_sampling_strategy", strategy, *fields])
        tokenizer = load_tokenizer(config)
        trainer = SFMDPOTrainer(
            model=str(place / "model"),
            args=config.train,
            train_dataset=load_token_pairs(config, tokenizer)[0].train,
            processing_class=tokenizer,
        )
        loader = trainer.get_train_dataloader()
        torch.rand(7)
        return [fingerprint(epoch_order(loader, epoch, 8)) for epoch in (1, 0)]

    first = orders()
    assert first == orders("--learning_rate", "1e-5") and first[0] != first[1]
    assert first == orders("--per_device_train_batch_size", "4")
    assert first != orders("--seed", "4")


# ---- full_determinism


@pytest.fixture
def nondeterministic_afterwards():
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_full_determinism_gives_bitwise_equal_runs(place, monkeypatch, nondeterministic_afterwards):
    """Padding-free, cached reference, balanced batches, a worker: metrics and weights bit by bit."""
    modes = []
    original = train_dpo.SFMDPOTrainer._compute_loss

    def recording(self, *args):
        modes.append(torch.are_deterministic_algorithms_enabled())
        return original(self, *args)

    monkeypatch.setattr(train_dpo.SFMDPOTrainer, "_compute_loss", recording)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "")  # which transformers sets, with others of the kind
    fields = "--full_determinism true --padding_free true --precompute_ref_log_probs true --dataloader_num_workers 1"
    fields += " --train_sampling_strategy batch_rebalance"
    a, b = (train(place, name, *fields.split()) for name in ("a", "b"))
    assert modes and all(modes)
    logs = [
        [
            {k: v for k, v in e.items() if not k.startswith("perf/")}
            for e in json.loads(text)["log_history"]
            if "loss" in e
        ]
        for text in ((run / "trainer_state.json").read_text() for run in (a, b))
    ]
    assert len(logs[0]) == 3 and logs[0] == logs[1]
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
