"""The settings of a run and their memory: which is chosen, and that its micro-batch is the largest of the run."""

import functools
import math
import shlex

import numpy as np
import pytest
import torch

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.sampler import FIRST_STEPS_FOR, PairSampler
from sfm_dpo.memory.planner import FIXED_TOKENS, MemoryPlanner, MicroBatch, choose_setting
from tests.tiny_models import tiny_config

RNG = np.random.default_rng(0)
RESPONSES = np.exp(RNG.normal(5, 1, (2, 1024))).astype(np.int64).clip(4, 4000)
LENGTHS = Lengths(np.full(1024, 50), *RESPONSES, np.zeros(1024, dtype=np.int64))


def configuration(*fields: str):
    argv = ["--model_name_or_path=m", "--dataset_name=d", "--use_cpu", "--fit_memory=true", *fields]
    return parse_config([*argv, "--global_batch_size=128", "--train_sampling_strategy=batch_rebalance"])


def plan_memory(config, **overrides) -> MemoryPlanner:
    model_config = tiny_config("gpt_neox", num_hidden_layers=8, **overrides)
    dtype = torch.bfloat16 if overrides else torch.float32
    return MemoryPlanner(config, model_config, LENGTHS, 4, dtype, on_gpu=bool(overrides))


@functools.cache
def list_settings(*fields: str):
    return plan_memory(configuration(*fields)).list_settings()


@pytest.mark.parametrize("packed", ["true", "false"])
def test_less_memory_means_more_work_and_never_more_than_the_limit(packed):
    every = list_settings(f"--padding_free={packed}")
    config = configuration()
    assert {setting.per_device for setting in every} == set(FIRST_STEPS_FOR)
    limits = sorted({setting.bytes for setting in every})
    chosen = [choose_setting(every, limit, config) for limit in limits]
    assert all(setting.bytes <= limit for setting, limit in zip(chosen, limits, strict=True))
    assert [setting.work for setting in chosen] == sorted((setting.work for setting in chosen), reverse=True)
    assert (chosen[-1].checkpointed_layers, chosen[0].checkpointed_layers) == (0, 8)
    assert chosen[0].per_device == 1 and choose_setting(every, 0, config) == chosen[0]
    if packed == "false":  # TRL's grid: the longest sequence, twice for each pair
        assert chosen[0].tokens == 2 * int(LENGTHS.total.max())


@pytest.mark.parametrize(
    ("length", "epochs"), [("num_train_epochs=1", 1), ("num_train_epochs=3", 3), ("max_steps=20", 3)]
)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_largest_micro_batch_is_the_largest_of_all(size, length, epochs):
    tokens = LENGTHS.sequences.sum(axis=1)
    config = configuration(f"--{length}", "--padding_free=true", "--prefix_sharing=false")
    planned = {batch.per_device: batch.tokens for batch in plan_memory(config).micro_batches}
    sampler = PairSampler(LENGTHS, "batch_rebalance", 128, size, seed=config.train.seed)
    largest = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        largest = max(largest, tokens[np.array(list(sampler))].reshape(-1, size).sum(axis=1).max())
    assert planned[size] == largest


def test_second_copies_of_keys_and_the_update_take_memory():
    def plan(tokens: int, copies: int) -> int:
        planner.micro_batches = [MicroBatch(1, tokens, copies, 16, 1.0, tokens)]
        vars(planner).pop("activations", None)
        return next(setting.bytes for setting in planner.list_settings() if not setting.checkpointed_layers)

    planner = plan_memory(configuration("--padding_free=true"), hidden_size=512, intermediate_size=2048)
    keys_and_values = 2 * 8 * 512 * 2  # bytes of a token, saved for the backward in bf16
    assert plan(4096, 4096) - plan(4096, 0) == pytest.approx(4096 * keys_and_values, rel=0.2)  # and gradients
    assert plan(1, 0) == 4 * planner.trained // 4  # more than activations: a rank's gradients, once more


def test_a_settings_options_choose_it():
    every = list_settings("--padding_free=true")
    for setting in every:
        named = configuration(*shlex.split(setting.options))
        assert not {"per_device_train_batch_size", "gradient_checkpointing"} & set(named.fitted)
        assert choose_setting(every, math.inf, named) == setting
    partly = configuration("--gradient_checkpointing=false")
    expected = next(s for s in every if (s.per_device, s.checkpointed_layers) == (1, 0))
    assert choose_setting(every, 0, partly) == expected
    with pytest.raises(UserError, match="checkpointed_layers 9: the model has 8; give at most 8"):
        choose_setting(every, math.inf, configuration("--checkpointed_layers=9"))


def test_the_setting_of_the_resumed_run_is_chosen_again_if_it_fits_and_nothing_else_is_given():
    every = list_settings("--padding_free=true")
    earlier = (2, 3)
    again = next(setting for setting in every if (setting.per_device, setting.checkpointed_layers) == earlier)
    config = configuration()
    less = again.bytes - 1
    assert choose_setting(every, math.inf, config, earlier) == again != choose_setting(every, math.inf, config)
    assert choose_setting(every, less, config, earlier) == choose_setting(every, less, config)
    assert choose_setting(every, math.inf, configuration("--per_device_train_batch_size=1"), earlier).per_device == 1


def test_on_a_gpu_a_second_pair_can_be_worth_a_few_checkpointed_layers():
    """A micro-batch has a cost of its own; on a CPU it has none."""

    def work(on_gpu: bool) -> dict[tuple[int, int], float]:
        config = configuration("--padding_free=true")
        model_config = tiny_config("gpt_neox", num_hidden_layers=8)
        every = MemoryPlanner(config, model_config, LENGTHS, 4, on_gpu=on_gpu).list_settings()
        return {(setting.per_device, setting.checkpointed_layers): setting.work for setting in every}

    gpu = work(True)
    cpu = work(False)
    assert gpu[2, 4] < gpu[1, 0] and cpu[2, 4] > cpu[1, 0]
    computed = LENGTHS.computed(prefix_sharing=True).mean()
    assert gpu[1, 0] - cpu[1, 0] == pytest.approx(FIXED_TOKENS / computed)
