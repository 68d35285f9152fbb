"""The FLOP formula against PyTorch's own counter, and the metrics of a run."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sfm_dpo.model.flops import ForwardFlops, count_experts
from sfm_dpo.model.loading import meta_model
from sfm_dpo.model.packing import find_shared, why_not_packed, why_not_shared
from sfm_dpo.run.facts import ForwardPath
from sfm_dpo.train import metrics as metrics_module
from sfm_dpo.train.metrics import CountingCollator, Meter, MetricSums
from tests.tiny_models import tiny_model

SHAPE = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 8}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
OTHERS = {
    "mistral": SHAPE,  # a window without layer types
    "gemma3": {"text_config": SHAPE, "vision_config": VISION},  # an image reader
    "gemma4_text": SHAPE | {"vocab_size_per_layer_input": 200, "hidden_size_per_layer_input": 64},  # more embeddings
    "deepseek_v3": SHAPE | LATENT | {"first_k_dense_replace": 2},  # heads of two sizes
}


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama", "olmo3", "smollm3", *OTHERS])
def test_forward_flops_against_torch(architecture):
    """One sequence of n tokens, eager attention: torch counts all n x n pairs, the formula the visible ones."""
    n = 24
    if architecture in OTHERS:
        config = AutoConfig.for_model(architecture, **OTHERS[architecture])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    else:
        model = tiny_model(architecture, attn_implementation="eager").eval()
    ids = torch.randint(0, 200, (1, n))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    flops = ForwardFlops.of(model)
    pairs = sum(per_pair for _, per_pair in flops.attention) * n * n
    matrices = flops.per_token * n + flops.per_response_token * n
    # RoPE's outer product is the one matmul that the formula leaves out
    assert counter.get_total_flops() == pytest.approx(matrices + pairs, rel=0.01)
    assert architecture != "mistral" or [window for window, _ in flops.attention] == [8]
    planned = meta_model(model.config)
    assert ForwardFlops.of(planned) == flops and planned.num_parameters() == model.num_parameters()


@pytest.mark.parametrize("lora", [False, True])
def test_training_flops_against_torch(lora):
    """Forward and backward; under LoRA the base's weights get no gradient."""
    n = 24
    model = tiny_model("llama", attn_implementation="eager").train()
    if lora:
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).get_base_model()
    ids = torch.randint(0, 200, (1, n))
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    flops = ForwardFlops.of(model)
    visible = flops(torch.tensor([n]), n, training=True)
    every = 3 * sum(per_pair for _, per_pair in flops.attention) * (n * n - n * (n + 1) // 2)
    assert counter.get_total_flops() == pytest.approx(visible + every, rel=0.02)
    forwards = visible / flops(torch.tensor([n]), n)
    assert 2 < forwards < 2.4 if lora else forwards == pytest.approx(3)


def test_attention_counts_visible_pairs():
    flops = ForwardFlops(per_token=0, per_response_token=0, attention=((None, 1), (4, 1)))
    full = sum(i + 1 for i in range(10)) + sum(i + 1 for i in range(3))
    windowed = sum(min(i + 1, 4) for i in range(10)) + sum(i + 1 for i in range(3))
    assert flops(torch.tensor([10, 3]), response_tokens=5) == full + windowed


@pytest.mark.parametrize("kind", ["olmoe", "deepseek_v3", "glm4_moe", "phimoe", "granitemoe", "mixtral"])
def test_experts_count_as_far_as_they_are_active_by_each_name(kind):
    """Twice the active experts: as many more matrices, whatever the model calls its experts."""
    shape = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    shape |= {"n_group": 1, "topk_group": 1}
    model = meta_model(AutoConfig.for_model(kind, first_k_dense_replace=0, **shape, num_experts_per_tok=2))
    experts = count_experts(model.config)
    sizes = [p.numel() for p in model.parameters() if p.dim() == 3 and len(p) == experts]
    once = ForwardFlops.of(model).per_token
    model.config.num_experts_per_tok = 4
    assert ForwardFlops.of(model).per_token - once == 2 * sum(sizes) * 2 // experts > 0


def collator(reference_in_step: bool, packed: bool, prefix_sharing: bool) -> CountingCollator:
    path = ForwardPath(packed, prefix_sharing, "fa2")
    return CountingCollator(dict, ForwardFlops(1, 0, ((None, 1),)), reference_in_step, path)


@pytest.mark.parametrize(("packed", "fraction"), [(False, 0.25), (True, 0.0)])
def test_padding_counts_only_where_it_is_computed(packed, fraction):
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    completion = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0]])
    meter = Meter()
    meter.add(collator(False, packed, prefix_sharing=False).count(mask, mask, completion))
    visible = sum(range(1, 5)) + sum(range(1, 3))
    assert (meter.counts["tokens"], meter.counts["pairs"], meter.counts["flops"]) == (6, 1, 3 * (6 + visible))
    meter.seconds = 2.0
    metrics = meter.metrics(dict(meter.counts), world_size=1)
    assert metrics["perf/padding_fraction"] == fraction
    assert (metrics["perf/tokens_per_second"], metrics["perf/pairs_per_second"]) == (3.0, 0.5)
    assert meter.seconds == 0.0 and meter.counts["tokens"] == 0


def test_a_shared_prompt_counts_once_as_in_the_packed_forward():
    """Prompts of 3 tokens and of 1: 2 of the 13 real tokens are not computed."""
    ids = torch.tensor([[5, 6, 7, 1, 2], [8, 1, 0, 0, 0], [5, 6, 7, 4, 0], [8, 3, 0, 0, 0]])
    mask = (ids != 0).long()
    completion = mask * (torch.arange(5) >= torch.tensor([[3], [1], [3], [1]]))
    assert find_shared(ids, mask, completion == 1).sum() == 2
    counts = collator(reference_in_step=True, packed=True, prefix_sharing=True).count(ids, mask, completion)
    visible = sum(range(1, 6)) + 2 * sum(range(1, 3)) + 3 + 4  # of the third row only the last two queries
    expected = {"pairs": 2, "tokens": 13, "computed": 11, "grid": 11, "flops": 4 * (11 + visible)}
    assert counts == expected
    assert Meter().metrics(counts, world_size=1)["perf/shared_fraction"] == pytest.approx(2 / 13)
    completion[0, 4] = 0  # a masked tool result is not part of the prompt
    assert collator(reference_in_step=True, packed=True, prefix_sharing=True).count(ids, mask, completion) == expected
    ids = torch.tensor([[5, 6, 7, 1, 1, 2], [5, 6, 7, 4, 4, 3]])  # also at the beginning of a response
    completion = (torch.arange(6) == 5).long().expand(2, 6)
    assert collator(True, True, prefix_sharing=True).count(ids, torch.ones_like(ids), completion)["computed"] == 12 - 3


def test_the_peak_is_that_of_the_fullest_rank(monkeypatch):
    monkeypatch.setattr(metrics_module, "gather_tensors", lambda rank_0: torch.cat([rank_0, 3 * rank_0]))
    sums = MetricSums()
    sums._add("m", torch.tensor(2.0), 1)
    assert sums.reduce({"tokens": 5}, {"peak": 7}) == {"m": 2.0, "tokens": 20.0, "peak": 21.0}


@pytest.mark.grid
def test_every_decoder_type_has_flops_and_an_answer_about_packing():
    """Of the types: per-layer heads (dots3_note_text), no heads (mamba, rwkv), no number of active experts."""
    answers = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = meta_model(AutoConfig.for_model(kind, num_hidden_layers=2))
        except Exception:  # a default configuration that contradicts itself
            continue
        assert ForwardFlops.of(model).per_token, kind
        answers[kind] = (bool(why_not_packed(model)), bool(why_not_shared(model, True, None)))
    assert len(answers) > 150
    assert answers["mamba"][0] and answers["minimax"][0] and not answers["olmo_hybrid"][0] and not answers["gemma2"][0]
