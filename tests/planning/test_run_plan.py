"""plan.py and memory.py: the figures against DeepSpeed's estimators, real gradients, and a measured process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from transformers import AutoConfig, AutoModelForCausalLM, Olmo3Config

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.model import memory
from sfm_dpo.planning.run_plan import make_plan, text
from tests.tiny_models import tiny_tokenizer

ROOT = Path(__file__).parents[2]
LENGTH, PER_DEVICE = 192, 2
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": 259,
    "tie_word_embeddings": False,
}

# A process that has loaded everything, then trains: what it holds more at its peak is the training's. Between runs the
# heap is given back and the peak that Linux remembers is reset.
MEASURE = """
import ctypes, gc, json, sys
import train_dpo

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

small, big, data, out = sys.argv[1:5]
fields = ["--dataset_name", data, "--use_cpu", "--global_batch_size", "4", "--per_device_train_batch_size", "2",
    "--max_length", "192", "--padding_free", "true", "--preflight", "skip", "--guard", "skip", "--save_strategy", "no",
    "--precompute_ref_log_probs", "true", "--max_steps", "2", "--learning_rate", "1e-6", "--logging_steps", "1"]

def run(model, name, checkpointing):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    more = ["--model_name_or_path", model, "--output_dir", f"{out}/{name}", "--gradient_checkpointing", checkpointing]
    assert train_dpo.main([*fields, *more]) == 0
    return status("VmHWM") - before

run(small, "warm", "false")
print("\\n" + json.dumps({"off": run(big, "off", "false"), "on": run(big, "on", "true")}))
"""


def test_memory_of_a_real_run_is_within_15_percent(tmp_path, tiny_folder, write_rows):
    config = Olmo3Config(**SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "big")
    tiny_tokenizer().save_pretrained(tmp_path / "big")
    rows = [{"prompt": f"{i}?", "chosen": "yes " * 60, "rejected": "no, " * 60} for i in range(8)]
    command = [sys.executable, "-c", MEASURE, tiny_folder("olmo3"), tmp_path / "big", write_rows("p.jsonl", rows)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    # The figure is of memory in use. By default glibc keeps freed blocks of up to 32 MB, here a fifth of all.
    env["MALLOC_MMAP_THRESHOLD_"] = "131072"
    done = subprocess.run([*command, tmp_path], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])

    parameters = sum(p.numel() for p in memory.meta_model(config).parameters())
    states = 16 * parameters  # fp32 weights, gradients and two moments
    tokens = 2 * PER_DEVICE * LENGTH
    head = memory.head_bytes(config, tokens, torch.float32, on_gpu=False)
    for name, checkpointing in (("on", True), ("off", False)):
        planned = states + memory.activations(config, torch.float32, checkpointing)(tokens, head)
        print(f"checkpointing {name}: planned {planned / 2**20:.0f} MiB, measured {measured[name] / 2**20:.0f} MiB")
        assert planned == pytest.approx(measured[name], rel=0.15), name
    assert measured["off"] > 1.3 * measured["on"], "activations must be worth measuring"


@pytest.fixture
def plan_of(tmp_path, monkeypatch):
    """A function: (shape, lengths, command-line fields, num_gpus) -> the plan for B200s."""

    def make(shape, lengths, fields=(), num_gpus=4):
        monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
        argv = ["--config", str(ROOT / "recipes/think.yaml"), "--output_dir", str(tmp_path), *fields]
        return make_plan(parse_config(argv, training=False), shape, lengths, len(lengths), "b200", num_gpus, 1)

    return make


def lengths_of(n: int, prompt: int, chosen: int, rejected: int) -> Lengths:
    return Lengths(*(np.full(n, value) for value in (prompt, chosen, rejected, 0)))


def test_figures_are_deepspeeds_and_the_formulas(plan_of):
    shape = AutoConfig.from_pretrained(ROOT / "bench/shapes/gpt_neox_6.9b")
    plan = plan_of(shape, lengths_of(1280, 100, 900, 400))
    n = plan["model"]["parameters"]
    assert n == 6_857_302_016  # Pythia 6.9B, as published
    _, zero2 = estimate_zero2_model_states_mem_needs(n, num_gpus_per_node=4, num_nodes=1, cpu_offload=False)
    states = plan["launches"]["zero2"]["states"]
    assert states["weights"] + states["gradients"] + states["optimizer"] == zero2 == 2 * n + int(18 * n / 4)
    # an epoch: 2 FLOPs a weight and token, three forwards; attention and head on top
    assert plan["data"]["tokens"] == 1280 * (1000 + 500)
    inner = n - 2 * 50432 * 4096
    dense = 6 * inner * plan["data"]["tokens"]
    assert dense < plan["time"]["flops"]["training"] < 1.15 * dense
    assert plan["time"]["flops"]["training"] == pytest.approx(3 * plan["time"]["flops"]["reference"])
    assert plan["time"]["hours"]["training"] == pytest.approx(
        plan["time"]["flops"]["training"] / (4 * 2.25e15 * 0.225 * 3600)
    )
    assert plan["batch"]["largest_micro_batch"] == 4 * 1500
    assert plan["launches"]["zero2"]["checkpoint"] == 16 * n and plan["launches"]["fsdp2"]["checkpoint"] == 16 * n
    # the largest batch fits, the next one does not
    for facts in plan["launches"].values():
        assert facts["total"][True] < facts["total"][False]
        assert facts["largest_per_device"][False] <= facts["largest_per_device"][True]


def test_padding_and_a_second_model_cost_memory(plan_of, tiny_folder):
    shape = AutoConfig.from_pretrained(tiny_folder("olmo3"))
    mixed = Lengths(
        *(np.concatenate([np.full(60, a), np.full(4, b)]) for a, b in ((9, 9), (20, 900), (20, 900), (0, 0)))
    )
    packed = plan_of(shape, mixed)
    padded = plan_of(shape, mixed, ["--padding_free", "false", "--precompute_ref_log_probs", "false"])
    assert packed["batch"]["largest_micro_batch"] == padded["batch"]["largest_micro_batch"] == 8 * 909
    short = plan_of(shape, lengths_of(64, 9, 20, 900))
    assert short["batch"]["largest_micro_batch"] == 4 * (29 + 909)
    assert padded["launches"]["zero2"]["states"]["reference"] == 2 * packed["model"]["parameters"]
    assert "reference" not in packed["launches"]["zero2"]["states"]


def test_lora_trains_the_adapter_alone(plan_of):
    shape = AutoConfig.from_pretrained(ROOT / "bench/shapes/gpt_neox_6.9b")
    fields = ["--use_peft", "true", "--lora_r", "64", "--lora_target_modules", "all-linear"]
    plan = plan_of(shape, lengths_of(1280, 100, 900, 400), fields)
    n, trained = plan["model"]["parameters"], plan["model"]["trained"]
    assert trained == 32 * 64 * (4096 + 3 * 4096 + 2 * 4096 + 2 * (4096 + 16384))  # a block's four matrices
    zero2 = plan["launches"]["zero2"]
    assert zero2["states"]["weights"] == 2 * n + 2 * trained
    assert zero2["states"]["optimizer"] == 3 * trained
    assert zero2["checkpoint"] == 20 * trained  # the adapter is saved in fp32, twice
    assert "LoRA" in text(plan)


def test_command_with_stated_percentiles(tmp_path):
    stated = {"pairs": 1000, "percentiles": {name: {"0": 50, "50": 100, "100": 200} for name in ("prompt", "chosen")}}
    stated["percentiles"]["rejected"] = {"0": 10, "50": {"tokens": 20}, "100": 40}
    (tmp_path / "l.json").write_text(json.dumps(stated))
    command = [sys.executable, "scripts/plan.py", "--config", "recipes/olmo_hybrid_7b_instruct.yaml"]
    command += ["--model_name_or_path", "bench/shapes/olmo3_7b", "--lengths", tmp_path / "l.json", "--pairs", "2000"]
    command += ["--gpu", "h100", "--num_gpus", "8", "--num_nodes", "4", "--json", tmp_path / "plan.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "7,298,011,136 parameters" in done.stdout and "GPU-hours" in done.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["data"]["pairs"] == 2000
    prompt, rejected = (150 / np.log(4), 30 / np.log(4))  # means of a log-uniform; chosen is as prompt
    assert plan["data"]["tokens"] == pytest.approx(2000 * (3 * prompt + rejected), rel=0.02)

    (tmp_path / "l.json").write_text("{}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "error: --lengths" in done.stderr


def test_mistakes_are_named(plan_of, tiny_folder):
    shape = AutoConfig.from_pretrained(tiny_folder("olmo3"))
    with pytest.raises(UserError, match=r"global_batch_size 128 is no multiple of .* x 3 GPUs"):
        plan_of(shape, lengths_of(8, 9, 9, 9), num_gpus=3)
