"""The settings of a run and their memory: which is chosen, and that its micro-batch is the largest of the run."""

import functools
import math
import shlex

import numpy as np
import pytest
import torch

from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.sampler import FIRST_STEPS_FOR, PairSampler
from sfm_dpo.memory.planner import MemoryPlanner, choose_candidate
from sfm_dpo.model.packing import decide_packing
from tests.tiny_models import tiny_config

RNG = np.random.default_rng(0)
RESPONSES = np.exp(RNG.normal(5, 1, (2, 1024))).astype(np.int64).clip(4, 4000)
LENGTHS = Lengths(np.full(1024, 50), *RESPONSES, np.zeros(1024, dtype=np.int64))


def configuration(*fields: str):
    argv = ["--model_name_or_path=m", "--dataset_name=d", "--use_cpu", *fields]
    return parse_config([*argv, "--global_batch_size=128", "--train_sampling_strategy=batch_rebalance"])


def plan_memory(config, **overrides) -> MemoryPlanner:
    model_config = tiny_config("gpt_neox", num_hidden_layers=8, **overrides)
    dtype = torch.bfloat16 if overrides else torch.float32
    packing = decide_packing(config, model_config)
    return MemoryPlanner(config, model_config, LENGTHS, 4, *packing, dtype, on_gpu=bool(overrides))


@functools.cache
def list_candidates(*fields: str):
    return plan_memory(configuration(*fields)).list_candidates()


@pytest.mark.parametrize("packed", ["true", "false"])
def test_less_memory_means_more_work_and_never_more_than_the_limit(packed):
    every = list_candidates(f"--padding_free={packed}")
    config = configuration()
    assert {candidate.per_device for candidate in every} == set(FIRST_STEPS_FOR)
    limits = sorted({candidate.bytes for candidate in every})
    chosen = [choose_candidate(every, limit, config.train) for limit in limits]
    assert all(candidate.bytes <= limit for candidate, limit in zip(chosen, limits, strict=True))
    assert [candidate.work for candidate in chosen] == sorted((candidate.work for candidate in chosen), reverse=True)
    assert (chosen[-1].checkpointed_layers, chosen[0].checkpointed_layers) == (0, 8)
    assert chosen[0].per_device == 1 and choose_candidate(every, 0, config.train) == chosen[0]
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


def test_the_update_takes_memory():
    planner = plan_memory(configuration("--padding_free=true"), hidden_size=512, intermediate_size=2048)
    planner.micro_batches = {1: (1, 1)}
    # More than activations: a rank's gradients, once more
    assert {candidate.bytes for candidate in planner.list_candidates()} == {4 * planner.trained // 4}


def test_a_candidates_options_choose_it():
    every = list_candidates("--padding_free=true")
    for candidate in every:
        named = configuration(*shlex.split(candidate.options))
        assert choose_candidate(every, math.inf, named.train) == candidate
    partly = configuration("--gradient_checkpointing=false")
    expected = next(s for s in every if (s.per_device, s.checkpointed_layers) == (1, 0))
    assert choose_candidate(every, 0, partly.train) == expected
    with pytest.raises(UserError, match="checkpointed_layers 9: the model has 8; give at most 8"):
        choose_candidate(every, math.inf, configuration("--checkpointed_layers=9").train)


def test_what_takes_as_much_as_a_setting_that_did_not_fit_is_not_chosen_again():
    every = list_candidates("--padding_free=true")
    args = configuration().train
    known = {(candidate.per_device, candidate.checkpointed_layers): candidate for candidate in every}
    tried = choose_candidate(every, math.inf, args, [known[8, 2]])
    assert (tried.per_device, tried.checkpointed_layers) == (4, 0)  # neither 16 pairs nor 8 with less than 3 layers
    assert choose_candidate(every, 0, args, [known[1, 8]]) == known[1, 8]  # nothing is left
