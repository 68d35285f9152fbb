"""The settings of a run and their memory: which is chosen, and that its micro-batch is the largest of the run."""

import copy
import dataclasses
import functools
import math
import shlex

import numpy as np
import pytest
import torch
from transformers.training_args import OptimizerNames

from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.sampler import FIRST_STEPS_FOR, PairSampler
from sfm_dpo.memory.asked import read_asked
from sfm_dpo.memory.planner import MemoryPlanner
from tests.tiny_models import tiny_config

RESPONSES = np.exp(np.random.default_rng(0).normal(5, 1, (2, 1024))).astype(np.int64).clip(4, 4000)
LENGTHS = Lengths(np.full(1024, 50), *RESPONSES)


def configuration(*fields: str):
    argv = ["--model_name_or_path=m", "--dataset_name=d", "--use_cpu", *fields]
    return parse_config([*argv, "--global_batch_size=128", "--train_sampling_strategy=batch_rebalance"])


def plan_memory(config, **overrides) -> MemoryPlanner:
    model_config = tiny_config("gpt_neox", num_hidden_layers=8, **overrides)
    dtype = torch.bfloat16 if overrides else torch.float32
    asked = read_asked(config, model_config)
    packing = (asked.can_pack, asked.can_share)
    return MemoryPlanner(config, model_config, asked, LENGTHS, 4, *packing, dtype, on_gpu=bool(overrides))


@functools.cache
def plan_once(*fields: str) -> MemoryPlanner:
    planner = plan_memory(configuration(*fields))
    planner.list_candidates()  # traces
    return planner


def choose(planner: MemoryPlanner, limit: float, *fields: str, failed=()):
    """The candidate under other fields, without the options of the next smaller one."""
    other = copy.copy(planner)
    other.config = configuration(*fields)
    other.asked = read_asked(other.config, planner.model_config)
    return dataclasses.replace(other.choose(limit, 0, failed=failed), smaller=None)


@pytest.mark.parametrize("packed", ["true", "false"])
def test_less_memory_means_more_work_and_never_more_than_the_limit(packed):
    planner = plan_once(f"--padding_free={packed}")
    every = planner.list_candidates()
    assert {candidate.per_device for candidate in every} == set(FIRST_STEPS_FOR)
    limits = sorted({candidate.bytes for candidate in every})
    chosen = [choose(planner, limit) for limit in limits]
    assert all(candidate.bytes <= limit for candidate, limit in zip(chosen, limits, strict=True))
    assert [candidate.work for candidate in chosen] == sorted((candidate.work for candidate in chosen), reverse=True)
    assert (chosen[-1].checkpointed_layers, chosen[0].checkpointed_layers) == (0, 8)
    assert chosen[0].per_device == 1 and choose(planner, 0) == chosen[0]
    if packed == "false":  # TRL's grid: the longest sequence, twice for each pair
        assert chosen[0].tokens == 2 * int(LENGTHS.total.max())


@pytest.mark.parametrize(
    ("length", "epochs"), [("num_train_epochs=1", 1), ("num_train_epochs=3", 3), ("max_steps=20", 3)]
)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_largest_micro_batch_is_the_largest_of_all(size, length, epochs):
    tokens = LENGTHS.sequences.sum(axis=1)
    config = configuration(f"--{length}", "--padding_free=true", "--prefix_sharing=false")
    planned = plan_memory(config).micro_batches
    sampler = PairSampler(LENGTHS, "batch_rebalance", 128, size, seed=config.train.seed)
    largest = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        largest = max(largest, tokens[np.array(list(sampler))].reshape(-1, size).sum(axis=1).max())
    assert planned[size][0] == largest


@pytest.mark.parametrize(
    ("optim", "of_matrix", "of_partition"),
    [("adamw_torch_fused", 8, 8), ("adagrad", 4, 4), ("adafactor", 0, 4), ("sgd", 0, 0)],
)
def test_the_optimizer_takes_what_its_own_state_takes(optim, of_matrix, of_partition):
    """Adafactor factors the state of matrices; DeepSpeed gives it partitions, which are vectors."""
    planner = plan_memory(configuration(f"--optim={optim}"))
    expected = {"zero2": (4 + of_partition) / 4, "zero3": (4 + of_partition) / 4, "fsdp2": of_matrix / 4}
    for launch, size in (expected | {"none": of_matrix}).items():
        planner.launch = launch
        assert planner.states({})["optimizer"] == int(size * planner.trained), launch


def test_an_optimizer_that_is_not_installed_here_is_planned_as_adamw(caplog):
    with caplog.at_level("INFO"):
        planner = plan_memory(configuration())
        planner.config.train.optim = OptimizerNames.GROKADAMW
        assert planner.states({})["optimizer"] == 8 * planner.trained
    assert "optim grokadamw: planned as AdamW, because it cannot be measured here: " in caplog.text


@pytest.mark.parametrize(("dtype", "size"), [("float32", 6), ("bfloat16", 2)])
def test_weights_that_nothing_shards_are_held_in_their_own_dtype(dtype, size):
    """Autocast copies those that are not in 16 bit."""
    config = configuration(f"--dtype={dtype}", "--use_peft=true", "--lora_target_modules=all-linear")
    planner = plan_memory(config, hidden_size=128)  # computes in bf16
    weights = planner.states({})["weights"]
    assert weights == size * (planner.parameters + planner.trained)


def test_the_update_takes_memory():
    planner = plan_memory(configuration("--padding_free=true"), hidden_size=512, intermediate_size=2048)
    planner.micro_batches = {1: (1, 1)}
    # More than activations: a rank's gradients, once more
    assert {candidate.bytes for candidate in planner.list_candidates()} == {4 * planner.trained // 4}


def test_a_candidates_options_choose_it():
    planner = plan_once("--padding_free=true")
    every = planner.list_candidates()
    for candidate in every:
        assert choose(planner, math.inf, *shlex.split(candidate.options)) == candidate
    expected = next(s for s in every if (s.per_device, s.checkpointed_layers) == (1, 0))
    assert choose(planner, 0, "--gradient_checkpointing=false") == expected


def test_what_takes_as_much_as_a_setting_that_did_not_fit_is_not_chosen_again():
    planner = plan_once("--padding_free=true")
    known = {(each.per_device, each.checkpointed_layers): each for each in planner.list_candidates()}
    tried = choose(planner, math.inf, failed=[known[8, 2]])
    assert (tried.per_device, tried.checkpointed_layers) == (4, 0)  # neither 16 pairs nor 8 with less than 3 layers
    assert choose(planner, 0, failed=[known[1, 8]]) == known[1, 8]  # nothing is left
