"""Planned memory against a measured process."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, BambaConfig, Ernie4_5_MoeConfig, Gemma2Config

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.memory.activations import Activations, _trace_bytes, head_bytes, trace_activations
from sfm_dpo.memory.asked import read_asked
from sfm_dpo.memory.planner import MemoryPlanner
from sfm_dpo.model.sharding import fit_buckets, zero_config
from sfm_dpo.planning.run_plan import read_lengths
from sfm_dpo.run.folder import TRAINER_STATE, read_file
from tests.e2e.runs import make_place
from tests.memory.test_planner import LENGTHS, configuration
from tests.toolbox import in_grid, sampled


@pytest.mark.parametrize(
    ("config", "packed", "fails"),
    [
        (Gemma2Config, True, "memory cannot be planned for gemma2: ValueError: .* packed attention does not support"),
        (Gemma2Config, False, None),
        (BambaConfig, False, "memory cannot be planned for bamba: AttributeError: .*layers_block_type"),
        (Ernie4_5_MoeConfig, False, None),  # with a frozen parameter
    ],
)
def test_what_a_trace_cannot_do_is_one_line(config, packed, fails, monkeypatch):
    monkeypatch.setattr("sfm_dpo.memory.activations.TRACED_TOKENS", 64)
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "moe_num_experts": 8}
    shape = config(**shape)
    planner = MemoryPlanner(configuration(), shape, read_asked(configuration(), shape), LENGTHS, 1, packed, False)
    with pytest.raises(UserError, match=fails) if fails else nullcontext():
        assert planner.activations[0].saved[1] > 0


SHAPE = {"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 6, "layer_types": None}


@pytest.mark.grid
def test_activations_of_a_real_run_are_planned_within_15_percent(tmp_path):
    """By what checkpointing saves of a process's peak: the rest of the process is the same."""
    rows = [{"prompt": f"{i}?", "chosen": "yes " * 60, "rejected": "no, " * 60} for i in range(8)]
    place = make_place(tmp_path, rows, {"olmo3": SHAPE}, {"max_length": 192, "max_steps": 3})
    # By default glibc keeps freed blocks of up to 32 MB, here a fifth of all
    fields = {"global_batch_size": 2, "prefix_sharing": "false", "env": {"MALLOC_MMAP_THRESHOLD_": "131072"}}
    config = AutoConfig.from_pretrained(place.model)
    tokens = 2 * 2 * 192  # two pairs, both sequences of each cut to max_length
    head = head_bytes(config, tokens, torch.float32, on_gpu=False)
    measured = []
    planned = []
    for checkpointing in (False, True):
        run = place.start(str(checkpointing), gradient_checkpointing=checkpointing, **fields).finish()
        history = read_file(run.folder / TRAINER_STATE)["log_history"]
        measured.append(2**30 * max(entry["perf/peak_memory_gib"] for entry in history if "loss" in entry))
        planned.append(trace_activations(config, torch.float32, checkpointing, 1.0).peak_bytes(tokens, head))
    assert measured[0] - measured[1] == pytest.approx(planned[0] - planned[1], rel=0.15)


# Saved for the backward by a layer and token, in units of 2 bytes x hidden size, as counted from the models' code
UNITS = {"gpt_neox_6.9b": 17.1, "olmo3_7b": 32.9}
SHAPES = sorted(path.parent.name for path in PROJECT.glob("bench/shapes/*/config.json"))
# Others of their class are traced; a whole olmo_hybrid_7b takes minutes
NOT_TRACED = ("gpt_neox_6.9b", "olmo2_1b", "olmo2_13b", "olmo3_32b", "olmo_hybrid_7b")
TRACED = map(in_grid, sampled([name for name in SHAPES if name not in NOT_TRACED], 3))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param(True, marks=pytest.mark.grid), False])
@pytest.mark.parametrize("name", ["gpt_neox_6.9b", *TRACED])
def test_the_plan_is_a_trace_of_all_layers_at_24000_tokens(name, checkpointing):
    config = AutoConfig.from_pretrained(PROJECT / "bench/shapes" / name)
    kinds = getattr(config, "layer_types", None) or ["block"] * config.num_hidden_layers
    traced = _trace_bytes(config, torch.bfloat16, checkpointing, list(kinds), 24_000)
    plan = trace_activations(config, torch.bfloat16, checkpointing, 1.0)
    planned = [plan.saved @ [1, 24_000], plan.peak @ [1, 24_000]]
    assert planned == pytest.approx(traced.tolist(), rel=0.05)
    if not checkpointing and name in UNITS:
        saved = planned[0] / (2 * config.hidden_size * config.num_hidden_layers * 24_000)
        assert saved == pytest.approx(UNITS[name], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.grid) for count in (1, 7))])
def test_the_plan_of_some_checkpointed_layers_is_their_trace(count):
    config = AutoConfig.from_pretrained(PROJECT / "bench/shapes/gpt_neox_6.9b", num_hidden_layers=8)
    traced = _trace_bytes(config, torch.bfloat16, count / 8, ["block"] * 8, 24_000)
    all_and_none = [trace_activations(config, torch.bfloat16, checkpointing, 1.0) for checkpointing in (True, False)]
    plan = Activations.mix(*all_and_none, count / 8)
    assert [plan.saved @ [1, 24_000], plan.peak @ [1, 24_000]] == pytest.approx(traced.tolist(), rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "checkpointed", "tokens", "gib"),
    [(24, 5, 16_620, 130.72), in_grid(24, 9, 16_620, 123.61), in_grid(12, 0, 38_869, 107.91)],
)
def test_the_plan_is_what_a_gpu_took(layers, checkpointed, tokens, gib):
    """Measured on one H200 by calibration under ZeRO-2, recipes/think.yaml with fewer layers and shared prompts."""
    shape = AutoConfig.from_pretrained(PROJECT / "bench/shapes/gpt_neox_6.9b", num_hidden_layers=layers)
    lengths = read_lengths(PROJECT / "bench/shapes/dolci_think_lengths.json").truncate(8192, 4096)
    config = configuration(f"--checkpointed_layers={checkpointed}")
    planner = MemoryPlanner(config, shape, read_asked(config, shape), lengths, 1, True, True, launch="zero2")
    planner.micro_batches = {1: (tokens, tokens)}
    states = planner.states(fit_buckets(zero_config("zero2"), planner.model))
    chosen = planner.choose(0, sum(states.values()))
    assert chosen.bytes / 2**30 == pytest.approx(gib, rel=0.005)


@pytest.mark.grid
@pytest.mark.parametrize("share", [0, 1])  # between, layers of unequal size make it approximate
def test_the_plan_of_recurrent_layers_is_a_trace_of_transformers_own_code(share):
    """At fewer tokens and layers: that code takes seconds for a thousand tokens. fla's kernels, which save less, are
    compiled by Triton for a GPU only, so the plan is an upper bound for them."""
    config = AutoConfig.from_pretrained(PROJECT / "bench/shapes/olmo_hybrid_7b")
    config.num_hidden_layers = 4
    config.layer_types = [*3 * ["linear_attention"], "full_attention"]
    traced = _trace_bytes(config, torch.bfloat16, share, config.layer_types, 4096)
    plan = trace_activations(config, torch.bfloat16, bool(share), 1.0)
    assert [plan.saved @ [1, 4096], plan.peak @ [1, 4096]] == pytest.approx(traced.tolist(), rel=0.05)
