"""The plan of a run: its numbers against DeepSpeed's estimators and formulas, and the commands."""

import json
import re

import numpy as np
import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from transformers import AutoConfig

from scripts import plan
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.data.pairs import PARTS
from sfm_dpo.planning import run_plan
from sfm_dpo.planning.run_plan import MFU, Planner, format_plan
from tests.tiny_models import tiny_config
from tests.toolbox import in_grid

AS_NAMED = "--per_device_train_batch_size 4 --gradient_checkpointing true".split()
PYTHIA = AutoConfig.from_pretrained(PROJECT / "bench/shapes/gpt_neox_6.9b")


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    """A function: (shape, lengths, command-line fields, GPUs) -> the planner of 16 times the lengths."""

    def make(shape, lengths, fields=(), gpus=4):
        monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
        argv = ["--config", str(PROJECT / "recipes/think.yaml"), "--output_dir", str(tmp_path), *AS_NAMED, *fields]
        repeated = lengths.select(np.arange(16 * len(lengths)) % len(lengths))
        return Planner(parse_config(argv, gpus, training=False), shape, repeated, "B200", gpus)

    return make


def lengths_of(n: int, prompt: int, chosen: int, rejected: int) -> Lengths:
    return Lengths(*(np.full(n, value) for value in (prompt, chosen, rejected)))


def test_numbers_are_deepspeeds_and_the_formulas(plan_of):
    planner = plan_of(PYTHIA, lengths_of(80, 100, 900, 400))
    plan = planner.plan()
    n = plan["model"]["parameters"]
    assert n == 6_857_302_016  # Pythia 6.9B, as published
    _, zero2 = estimate_zero2_model_states_mem_needs(n, num_gpus_per_node=4, num_nodes=1, cpu_offload=False)
    embedding = 50432 * 4096
    _, zero3, _ = estimate_zero3_model_states_mem_needs(n, embedding, 4, 1, cpu_offload=False)
    zero2 -= 2 * n / 4  # the estimate counts 16-bit gradients beside their fp32 sums, which DeepSpeed does not keep
    for launch, estimate in (("zero2", zero2), ("zero3", zero3)):
        states = plan["launches"][launch]["states"]
        assert states["weights"] + states["gradients"] + states["optimizer"] == pytest.approx(estimate, abs=2)
    # an epoch: 2 FLOPs a weight and token, three forwards; attention and head on top
    assert plan["data"]["tokens"] == 1280 * (1000 + 500)
    dense = 6 * (n - 2 * embedding) * 1280 * (1000 + 500 - 99)  # of the prompt all but the last token once
    assert dense < plan["time"]["flops"]["training"] < 1.15 * dense
    assert plan["time"]["flops"]["training"] == pytest.approx(3 * plan["time"]["flops"]["reference"])
    stopped = plan_of(PYTHIA, lengths_of(80, 100, 900, 400), ["--max_steps", "3"]).plan()  # of 10
    assert (plan["batch"]["steps"], stopped["batch"]["steps"]) == (10, 3)
    assert stopped["time"]["flops"]["training"] == pytest.approx(0.3 * plan["time"]["flops"]["training"])
    assert plan["time"]["hours"] == pytest.approx(sum(plan["time"]["flops"].values()) / (4 * 2.25e15 * MFU * 3600))
    assert "at 37% MFU (--mfu; one H200: 0.37 to 0.44)" in format_plan(plan)
    for facts in plan["launches"].values():
        assert facts["choice"]["tokens"] == 4 * (1500 - 99) and facts["choice"]["checkpointed_layers"] == 32
        assert sum(facts["states"].values()) < facts["choice"]["bytes"] < 0.9 * 180e9 and facts["fits"] == "yes"
    assert plan["launches"]["zero2"]["checkpoint"] == 16 * n and plan["launches"]["fsdp2"]["checkpoint"] == 16 * n


@pytest.mark.parametrize(("shape", "gpu", "host"), [("gpt_neox_6.9b", 38, 128), in_grid("olmo3_7b", 41, 137)])
def test_a_7b_model_trains_on_one_gpu_with_its_optimizer_on_the_host(plan_of, shape, gpu, host):
    shape = AutoConfig.from_pretrained(PROJECT / "bench/shapes" / shape)
    limit = ["--gradient_checkpointing=", "--per_device_train_batch_size=", "--memory_gib=71"]  # of an H100
    plan = plan_of(shape, lengths_of(80, 100, 3000, 3000), limit, gpus=1).plan()
    assert [name for name, launch in plan["launches"].items() if launch["fits"] != "no"] == ["offload"]
    offload = plan["launches"]["offload"]
    states = offload["states"]
    assert round((states["weights"] + states["gradients"]) / 2**30) == gpu and states["optimizer"] == 0
    assert round(offload["host"] / 2**30) == host
    seconds = 3600 * offload["host_hours"] / plan["batch"]["steps"]
    assert seconds == pytest.approx((6 / 6e9 + 42 / 1e11) * plan["model"]["trained"])
    text = format_plan(plan)
    assert "\ndo not fit as configured: zero2, zero3, fsdp2; LAUNCH=offload fits with --" in text
    assert re.search(rf"\n  host memory +- +- +- +{offload['host'] / 2**30:.1f}\n", text)


def test_before_training_offload_converts_the_weights_on_the_gpu(plan_of):
    planner = plan_of(PYTHIA, lengths_of(80, 1, 2, 2), gpus=1)  # next to no activations
    plan = planner.plan_launch("offload")
    assert plan["choice"]["bytes"] == sum(plan["states"].values()) + 2 * planner.memory.trained


def test_another_reference_counts_with_its_own_size(plan_of):
    lengths = lengths_of(80, 100, 900, 400)
    larger = ["--ref_model_name_or_path", str(PROJECT / "bench/shapes/olmo2_13b"), "--use_peft", "true"]
    plan = plan_of(PYTHIA, lengths, [*larger, "--precompute_ref_log_probs", "false"]).plan()
    alone = plan_of(AutoConfig.from_pretrained(larger[1]), lengths).plan()
    size = 2 * alone["model"]["parameters"]
    states = {launch: facts["states"] for launch, facts in plan["launches"].items()}
    assert [states[launch]["reference"] for launch in ("zero2", "zero3")] == [size, size // 4]
    assert plan["time"]["flops"]["reference"] == alone["time"]["flops"]["reference"]


def test_longer_pairs_that_are_dropped_are_not_planned(plan_of):
    lengths = Lengths(*(np.array(values) for values in ([100, 30000], [900, 1000], [400, 10])))
    for overlong, expected in (("truncate", 32), ("drop", 16)):
        fields = ["--overlong", overlong, "--max_length", "4096", "--max_prompt_length", "4000"]
        with pytest.raises(UserError, match=f"global_batch_size 128: there are only {expected} pairs"):
            plan_of(tiny_config("olmo3"), lengths, fields)


def test_lora_trains_the_adapter_alone(plan_of):
    fields = ["--use_peft", "true", "--lora_r", "64", "--lora_target_modules", "all-linear"]
    plan = plan_of(PYTHIA, lengths_of(80, 100, 900, 400), fields).plan()
    n = plan["model"]["parameters"]
    trained = plan["model"]["trained"]
    assert trained == 32 * 64 * (4096 + 3 * 4096 + 2 * 4096 + 2 * (4096 + 16384))  # a block's four matrices
    zero2 = plan["launches"]["zero2"]
    assert zero2["states"]["weights"] == 2 * n + 2 * trained
    assert zero2["states"]["optimizer"] == 3 * trained
    assert zero2["checkpoint"] == 20 * trained  # the adapter is saved in fp32, twice
    assert "LoRA" in format_plan(plan) and "fsdp2" not in plan["launches"]


@pytest.mark.slow
def test_command_with_stated_percentiles(tmp_path, monkeypatch, capsys, environment):
    stated = {"pairs": 1000, "percentiles": {name: {"0": 50, "50": 100, "100": 200} for name in ("prompt", "chosen")}}
    stated["percentiles"]["rejected"] = {"0": 10, "50": 20, "100": 40}
    (tmp_path / "l.json").write_text(json.dumps(stated))
    monkeypatch.chdir(PROJECT)
    command = f"""--config recipes/olmo_hybrid_7b_instruct.yaml --lengths {tmp_path}/l.json --pairs 2000 --gpu h100
        --model_name_or_path bench/shapes/olmo3_7b --num_gpus 4 --num_nodes 2 --json {tmp_path}/plan.json""".split()
    assert plan.main(command) == 0
    assert "7,298,011,136 parameters" in capsys.readouterr().out
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert figures["data"]["pairs"] == 2000
    assert figures["batch"]["steps"] == 2000 // 128  # training leaves out what fills no batch
    mean = (3 * 150 + 30) / np.log(4)  # of log-uniforms: prompt twice, chosen, which is as prompt, and rejected
    assert figures["data"]["tokens"] == pytest.approx(2000 * mean, rel=0.02)


def test_stated_percentiles_are_of_as_many_pairs_as_a_run_draws(tmp_path, monkeypatch, capsys, environment):
    stated = {"pairs": 1000, "percentiles": {part: {"0": 50, "100": 200} for part in PARTS}}
    (tmp_path / "l.json").write_text(json.dumps(stated))

    def planned(config, shape, lengths, gpu, gpus):
        raise UserError(f"{len(lengths)} pairs")

    monkeypatch.setattr(run_plan, "Planner", planned)
    command = f"""--config {PROJECT}/recipes/think.yaml --model_name_or_path {PROJECT}/bench/shapes/olmo3_7b
        --lengths {tmp_path}/l.json""".split()
    for options, pairs in ((["--max_samples", "800", "--eval_fraction", "0.1"], 720), (["--pairs", "2000"], 2000)):
        assert plan.main([*command, *options]) == 2
        assert f"error: {pairs} pairs" in capsys.readouterr().err


def test_what_does_not_fit_is_said_with_what_does(plan_of):
    lengths = lengths_of(8, 100, 3000, 3000)
    text = format_plan(plan_of(PYTHIA, lengths, ["--gradient_checkpointing", "false", "--memory_gib", "80"]).plan())
    assert "do not fit as configured: zero2; LAUNCH=zero2 fits with --per_device_train_batch_size" in text
    assert " minutes)" in text
    assert "; use more GPUs" in format_plan(plan_of(PYTHIA, lengths, ["--memory_gib", "4"]).plan())
