"""Gated delta nets packed: each sequence from an empty state, in the recurrence and in the convolution before it."""

import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl.trainer.utils import add_fused_lm_head

from sfm_dpo.model import packing
from sfm_dpo.model.loading import meta_model
from sfm_dpo.model.packing import enable_padding_free, find_delta_nets, why_not_packed, why_not_shared
from tests.model.test_packing import (
    assert_single_sequences,
    log_probs_after_changing_row,
    make_batch,
    norm,
    one_by_one,
    run,
)
from tests.tiny_models import VOCAB_SIZE, tiny_config

ROWS = [(3, 30), (5, 100), (3, 1), (9, 66)]  # the delta rule is computed in chunks of 64 tokens
HYBRIDS = ("olmo_hybrid", "qwen3_next", "qwen3_5")


def tiny_hybrid(architecture):
    """Two gated delta nets of which one comes first, and full attention."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    shape |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    shape |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
    shape |= dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16)
    shape |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    shape |= {"initializer_range": 0.2, "pad_token_id": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16, "output_router_logits": False}
    config = {
        "olmo_hybrid": lambda: tiny_config("olmo_hybrid", **shape),
        "qwen3_next": lambda: Qwen3NextConfig(**shape, **experts),
        "qwen3_5": lambda: Qwen3_5TextConfig(**shape),
    }[architecture]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv1d):  # a convolution that matters: its first taps see other sequences
            torch.nn.init.normal_(module.weight, std=0.5)
    add_fused_lm_head(model)
    return model


def packed_hybrid(architecture):
    model = tiny_hybrid(architecture)
    enable_padding_free(model)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_packed_equals_single_sequences(architecture, checkpointing):
    model = packed_hybrid(architecture)
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = make_batch(ROWS)
    assert_single_sequences(run(model, batch), tiny_hybrid(architecture), batch)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_no_state_leaks_into_the_next_sequence(architecture, monkeypatch):
    batch = make_batch([(3, 30), (5, 12), (3, 20), (5, 7)])
    for row in range(4):
        others, own = log_probs_after_changing_row(packed_hybrid(architecture), batch, row)
        assert others < 1e-5 and own > 0.1
    # The measurement sees the leak of a row with boundaries for attention alone
    monkeypatch.setattr(packing, "_run_by_sequence", lambda forward, *args, cu_seq_lens_q, **kw: forward(*args, **kw))
    others, _ = log_probs_after_changing_row(packed_hybrid(architecture), batch, 0)
    assert others > 1e-2


# ---- with kernels: stand-ins with the arguments of causal_conv1d and fla


def convolve(hidden_states, weight, bias=None, seq_idx=None, activation=None, **unknown):
    """causal_conv1d_fn: `hidden_states` [1, D, T], taps [D, W]; a tap of another sequence counts as 0."""
    assert hidden_states.stride(1) == 1  # the kernel takes seq_idx with channels last alone
    out = torch.zeros_like(hidden_states)
    for back in range(weight.shape[1]):
        shifted = F.pad(hidden_states, (back, 0))[..., : hidden_states.shape[2]]
        if seq_idx is not None:
            shifted = shifted * (F.pad(seq_idx, (back, 0), value=-1)[:, : seq_idx.shape[1]] == seq_idx)[:, None]
        out = out + shifted * weight[:, weight.shape[1] - 1 - back, None]
    return F.silu(out) if activation in ("silu", "swish") else out


def delta_rule(query, key, value, g, beta, cu_seqlens=None, use_qk_l2norm_in_kernel=False, **unknown):
    """fla's chunk_gated_delta_rule, token by token: the state [H, K, V] is empty where a sequence begins."""
    assert use_qk_l2norm_in_kernel
    query, key = (x[0] * torch.rsqrt(x[0].square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    starts = [0] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for t in range(key.shape[0]):
        if t in starts:
            state = torch.zeros(*key.shape[1:], value.shape[-1])
        state = state * g[0, t].exp()[:, None, None]
        error = value[0, t] - (state * key[t][..., None]).sum(1)
        state = state + key[t][..., None] * (beta[0, t][:, None] * error)[:, None]
        outputs.append((state * query[t][..., None]).sum(1) * key.shape[-1] ** -0.5)
    return torch.stack(outputs)[None], None


@pytest.fixture
def kernels(monkeypatch):
    """A function: architecture, arguments that the kernels are not given -> a packed model that computes by them."""
    monkeypatch.setattr(packing, "has_delta_net_kernels", lambda: True)

    def make(architecture, *hidden):
        model = packed_hybrid(architecture)
        code = sys.modules[type(model).__module__]
        withhold = lambda kernel: lambda *a, **k: kernel(*a, **{n: v for n, v in k.items() if n not in hidden})  # noqa: E731
        monkeypatch.setattr(code, "causal_conv1d_fn", withhold(convolve))
        monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", withhold(delta_rule))
        return model

    return make


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_kernels_are_given_both_kinds_of_boundaries(architecture, kernels):
    batch = make_batch([(3, 9), (5, 30), (3, 1), (9, 6)])
    weights = torch.linspace(-1, 1, 4 * 34).view(4, 34)
    expected, expected_gradients = one_by_one(tiny_hybrid(architecture), batch, weights)  # before the kernels exist
    output, gradients = run(kernels(architecture), batch)
    assert (output.log_probs - expected).abs().max() <= 1e-4  # token by token rounds otherwise than in chunks
    difference = {name: gradients[name] - gradient for name, gradient in expected_gradients.items()}
    assert norm(difference) < 1e-3 * norm(expected_gradients)


@pytest.mark.parametrize("withheld", ["seq_idx", "cu_seqlens"])
def test_each_kernel_leaks_without_its_own_boundaries(kernels, withheld):
    batch = make_batch([(3, 30), (5, 12), (3, 20), (5, 7)])
    assert log_probs_after_changing_row(kernels("olmo_hybrid"), batch, 0)[0] < 1e-5
    assert log_probs_after_changing_row(kernels("olmo_hybrid", withheld), batch, 0)[0] > 1e-2


def test_state_along_the_sequence_shares_no_prompt():
    reason = why_not_shared(tiny_hybrid("olmo_hybrid"), True, None)
    assert reason == "'linear_attention' layers of model_type 'olmo_hybrid' carry state along the sequence"


# ---- which modules are gated delta nets

# What default configurations lack
LACKING = {"qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256}}
LACKING["qwen4_exp_text"] |= {"indexer_budget": 64, "indexer_compress_ratio": 4}


def passes_boundaries(module, hidden_size):
    """Whether the boundaries of a packed row reach the convolution and the delta rule, which refuse them on a CPU."""
    hidden_states = torch.empty(1, 8, hidden_size, dtype=torch.bfloat16, device="meta")
    for name in ("cu_seq_lens_q", "seq_idx"):
        try:
            module(hidden_states, **{name: torch.empty(3, dtype=torch.int32, device="meta")})
        except Exception as error:  # of any kind from a module that takes other arguments
            if "can't keep packed sequences apart" in str(error):
                continue
        return False
    return True


@pytest.mark.skipif(packing.has_delta_net_kernels(), reason="the kernels refuse no boundaries")
def test_canary_delta_nets():
    """In every decoder type the modules that pass boundaries to kernels are found, and no others."""
    tried = 0
    found = set()
    expected = set()
    for architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(architecture, **LACKING.get(architecture, {}))
            hidden_size = config.get_text_config().hidden_size
            model = meta_model(config)
        except Exception:  # a default configuration that contradicts itself or has several widths
            continue
        tried += 1
        found |= {type(net) for net in find_delta_nets(model)}
        one_of_each_type = {type(module): module for module in model.modules()}
        for kind, module in reversed(one_of_each_type.items()):  # a net before the layer around it
            inner = set(map(type, module.modules()))
            if not inner & expected and passes_boundaries(module, hidden_size):
                expected.add(kind)
    assert tried > 170
    assert found == expected
    assert len(found) == 6


def test_delta_nets_of_other_code_are_not_packed():
    model = tiny_hybrid("olmo_hybrid")
    assert not why_not_packed(model)
    nets = find_delta_nets(model)

    class RemoteNet(type(nets[0])):
        def forward(self, hidden_states, **kwargs):
            return hidden_states

    for net in nets:
        net.__class__ = RemoteNet
    assert "carry state from one sequence into the next" in why_not_packed(model)
