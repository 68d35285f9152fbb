"""fit_memory: the choice of pairs per device and checkpointed layers, and that it changes no loss."""

import json
import math
import shlex

import numpy as np
import pytest

import train_dpo
from sfm_dpo.config import parse_config
from sfm_dpo.data.sampler import FIRST_STEPS_FOR, PairSampler, list_micro_batches
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.model.memory_plan import MemoryPlanner, choose_setting
from sfm_dpo.run.checkpoint import STOP
from sfm_dpo.run.folder import read_resolved_config
from tests.tiny_models import tiny_config
from tests.toolbox import logged
from tests.train.test_trainer import make_trainer

RNG = np.random.default_rng(0)
RESPONSES = np.exp(RNG.normal(5, 1, (2, 1024))).astype(np.int64).clip(4, 4000)
LENGTHS = Lengths(np.full(1024, 50), *RESPONSES, np.zeros(1024, dtype=np.int64))


def configuration(*fields: str):
    argv = ["--model_name_or_path=m", "--dataset_name=d", "--use_cpu", "--fit_memory=true", *fields]
    return parse_config([*argv, "--global_batch_size=128", "--train_sampling_strategy=batch_rebalance"])


def list_settings(*fields: str):
    config = configuration(*fields)
    shape = tiny_config("gpt_neox", num_hidden_layers=8)
    planner = MemoryPlanner(config, shape, 4, half=False, on_gpu=False)
    return planner.list_settings(list_micro_batches(config, LENGTHS, False, 4))


@pytest.mark.parametrize("packed", ["true", "false"])
def test_less_memory_means_more_work_and_never_more_than_the_limit(packed):
    every, config = list_settings(f"--padding_free={packed}"), configuration()
    assert {setting.per_device for setting in every} == set(FIRST_STEPS_FOR)
    limits = sorted({setting.bytes for setting in every})
    chosen = [choose_setting(every, limit, config) for limit in limits]
    assert all(setting.bytes <= limit for setting, limit in zip(chosen, limits, strict=True))
    assert [setting.work for setting in chosen] == sorted((setting.work for setting in chosen), reverse=True)
    assert (chosen[-1].every_n_layers, chosen[0].every_n_layers) == (0, 1)
    assert chosen[0].per_device == 1 and choose_setting(every, 0, config) == chosen[0]
    if packed == "false":  # TRL's grid: the longest sequence, twice for each pair
        assert chosen[0].tokens == 2 * int(LENGTHS.total.max())


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_the_largest_micro_batch_is_the_largest_of_all_that_are_dealt(size, epochs):
    tokens = LENGTHS.sequences.sum(axis=1)
    config = configuration(f"--num_train_epochs={epochs}", "--padding_free=true")
    planned = {found.per_device: found.tokens for found in list_micro_batches(config, LENGTHS, False, 4)}
    sampler, largest = PairSampler(tokens, "batch_rebalance", 128, size, seed=config.train.seed), 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        largest = max(largest, tokens[np.array(list(sampler))].reshape(-1, size).sum(axis=1).max())
    assert planned[size] == largest


def test_a_settings_options_choose_it():
    every = list_settings()
    for setting in every:
        named = configuration(*shlex.split(setting.options))
        assert not {"per_device_train_batch_size", "gradient_checkpointing"} & set(named.fitted)
        assert choose_setting(every, math.inf, named) == setting
    partly = configuration("--gradient_checkpointing=false")
    assert choose_setting(every, 0, partly) == next(s for s in every if (s.per_device, s.every_n_layers) == (1, 0))


FIELDS = "--use_cpu --bf16 false --global_batch_size 8 --padding_free true --preflight skip --guard skip --max_steps 3"
FIELDS += " --learning_rate 1e-3 --logging_steps 1 --train_sampling_strategy batch_rebalance"


@pytest.fixture
def train(tiny_folder, write_rows, tmp_path):
    """A function: name of a run and fields -> (exit code, losses, its folder)."""
    rows = [
        {"prompt": f"{i}?", "chosen": "yes " * (i * 7 % 23 + 1), "rejected": "no, " * (i * 5 % 19 + 1)}
        for i in range(32)
    ]
    given = f"--model_name_or_path {tiny_folder('olmo3')} --dataset_name {write_rows('p.jsonl', rows)} {FIELDS}"

    def run(name: str, more: str = ""):
        folder = tmp_path / name
        code = train_dpo.main(f"{given} --output_dir {folder} {more}".split())
        entries = logged(folder) if (folder / "trainer_state.json").is_file() else []
        return code, [entry["loss"] for entry in entries], folder

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_losses_do_not_depend_on_the_setting(train):
    shared = "--precompute_ref_log_probs false --save_strategy no"
    runs = {}
    for pairs, every in ((4, 0), (2, 1), (1, 2)):
        kwargs = json.dumps({"use_reentrant": False, "every_n_layers": max(every, 1)}, separators=(",", ":"))
        fields = f"--per_device_train_batch_size {pairs} --gradient_checkpointing {bool(every)}"
        code, losses, _ = train(f"{pairs}-{every}", f"{shared} {fields} --gradient_checkpointing_kwargs {kwargs}")
        assert code == 0 and len(losses) == 3
        runs[pairs, every] = losses
    for losses in runs.values():
        assert losses == pytest.approx(runs[4, 0], abs=1e-5)
    assert abs(runs[4, 0][2] - runs[4, 0][0]) > 1e-3  # they moved


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_the_choice_is_kept_at_resume_and_is_no_part_of_what_was_asked(train, tmp_path, capsys):
    fit = "--fit_memory true --save_steps 100"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STOP).touch()
    code, _, run = train("run", f"{fit} --memory_gib 64")
    assert code == 75
    chosen = json.loads((run / "data.json").read_text())["fit_memory"]
    assert (chosen["per_device"], chosen["every_n_layers"]) == (8, 0)
    asked = read_resolved_config(run)
    assert asked["fit_memory"] is True and not {"per_device_train_batch_size", "gradient_checkpointing"} & set(asked)
    code, resumed, _ = train("run", f"{fit} --memory_gib 0.0001")
    assert code == 0 and json.loads((run / "data.json").read_text())["fit_memory"] == chosen
    code, losses, _ = train("whole", f"{fit} --memory_gib 64")
    assert resumed == losses
    code, _, _ = train("other", f"{fit} --memory_gib 0.0001")
    assert code == 2 and "hold no setting; the smallest needs 1 pairs per device" in capsys.readouterr().err


def test_the_layers_stay_checkpointed_as_asked(tiny_folder, tmp_path):
    kwargs = '--gradient_checkpointing_kwargs={"use_reentrant":false,"every_n_layers":2}'
    live = "--precompute_ref_log_probs=false"
    trainer = make_trainer(tiny_folder("olmo3"), tmp_path, "--max_steps=1", live, kwargs)
    trainer.eval_dataset = trainer.train_dataset

    def checkpointed():
        return [layer.gradient_checkpointing for layer in trainer.bare_model().model.layers]

    trainer.train()
    assert checkpointed() == [True, False, True]
    trainer.evaluate()
    batch = trainer._prepare_inputs(trainer.data_collator([trainer.train_dataset[0]]))
    trainer.compute_ref_log_probs(trainer.ref_model or trainer.model, batch)
    assert checkpointed() == [True, False, True]
