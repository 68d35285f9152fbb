"""The packed forward equals the padded one, in everything a loss of TRL reads, and in gradients; nothing leaks."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MambaConfig
from trl.trainer.utils import add_fused_lm_head

from sfm_dpo.common.errors import UserError
from sfm_dpo.model import packing
from sfm_dpo.model.attention import boundary_arguments
from sfm_dpo.model.packing import enable_padding_free
from tests.tiny_models import ARCHITECTURES, tiny_model

FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
LOG_PROB_TOLERANCE = 1e-5  # absolute, fp32
GRADIENT_TOLERANCE = 1e-4  # relative, on the norm

# (prompt length, response length) of each row, chosen rows first
BATCHES = {
    "very unequal": [(3, 90), (20, 1), (1, 40), (3, 1), (20, 30), (1, 2)],
    "one pair": [(7, 20), (7, 33)],
    "no padding": [(4, 30), (10, 24), (4, 30), (10, 24)],
}


def make_batch(rows, padding_side="right", device="cpu"):
    """TRL's `[2B, L]` batch with random tokens; labels -100 on prompt and padding."""
    generator = torch.Generator().manual_seed(0)
    length = max(prompt + response for prompt, response in rows)
    batch = {
        "input_ids": torch.full((len(rows), length), 256),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.long),
        "labels": torch.full((len(rows), length), -100),
    }
    for row, (prompt, response) in enumerate(rows):
        n = prompt + response
        start = 0 if padding_side == "right" else length - n
        batch["input_ids"][row, start : start + n] = torch.randint(0, 250, (n,), generator=generator)
        batch["attention_mask"][row, start : start + n] = 1
        batch["labels"][row, start + prompt : start + n] = batch["input_ids"][row, start + prompt : start + n]
    return {name: tensor.to(device) for name, tensor in batch.items()}


def padded_and_packed(architecture, attn_implementation="sdpa", **kwargs):
    padded = tiny_model(architecture, attn_implementation=attn_implementation, **kwargs)
    packed = tiny_model(architecture, **kwargs)
    for model in (padded, packed):
        add_fused_lm_head(model, outputs=FIELDS)
    enable_padding_free(packed)
    return padded, packed


def run(model, batch):
    """Outputs of the fused forward, and the gradients of a loss that weights every token differently."""
    output = model(**batch, fused_lm_head=True)
    weights = torch.linspace(-1, 1, output.log_probs.numel(), device=output.log_probs.device)
    loss = (output.log_probs * weights.view_as(output.log_probs)).sum()
    if output.aux_loss is not None:
        loss = loss + 100 * output.aux_loss
    model.zero_grad()
    loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def norm(gradients):
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


def assert_equal_runs(padded, packed, log_prob_tolerance=LOG_PROB_TOLERANCE, gradient_tolerance=GRADIENT_TOLERANCE):
    (expected, expected_grads), (got, got_grads) = padded, packed
    assert set(expected.keys()) == set(got.keys())
    for name, tensor in expected.items():
        assert tensor.dtype == got[name].dtype and tensor.shape == got[name].shape, name
        if tensor.dtype == torch.bool:
            assert torch.equal(got[name], tensor), name
        else:
            assert (got[name] - tensor).abs().max() <= log_prob_tolerance, name
    assert got_grads.keys() == expected_grads.keys() and len(got_grads) > 0
    assert norm(got_grads) == pytest.approx(norm(expected_grads), rel=gradient_tolerance)
    difference = {name: got_grads[name] - expected_grads[name] for name in got_grads}
    assert norm(difference) < gradient_tolerance * norm(expected_grads)


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "apertus", "smollm3"])
def test_equals_the_padded_path(architecture, rows, padding_side):
    padded, packed = padded_and_packed(architecture, "eager" if padding_side == "right" else "sdpa")
    batch = make_batch(BATCHES[rows], padding_side)
    assert (batch["attention_mask"].sum() < batch["attention_mask"].numel()) == (rows != "no padding")
    assert_equal_runs(run(padded, batch), run(packed, batch))


def test_positions_restart_in_every_sequence():
    """GPT-2 has learned absolute positions; RoPE would not notice positions that go on counting."""
    padded, packed = padded_and_packed("gpt2")
    batch = make_batch(BATCHES["very unequal"])
    assert_equal_runs(run(padded, batch), run(packed, batch))


def log_probs_after_changing_row(model, batch, row):
    """Log-probs before and after every token of one row is another; also its labels."""
    with torch.no_grad():
        before = model(**batch, fused_lm_head=True).log_probs
        changed = {name: tensor.clone() for name, tensor in batch.items()}
        other = (batch["input_ids"][row] + 100) % 250
        changed["input_ids"][row] = torch.where(batch["attention_mask"][row] == 1, other, batch["input_ids"][row])
        after = model(**changed, fused_lm_head=True).log_probs
    others = torch.arange(len(before)) != row
    return (before - after)[others].abs().max().item(), (before - after)[row].abs().max().item()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_sequence_sees_another(architecture, monkeypatch):
    _, packed = padded_and_packed(architecture)
    batch = make_batch([(3, 30), (5, 12), (3, 20), (5, 7)])
    for row in range(4):
        others, own = log_probs_after_changing_row(packed, batch, row)
        assert others < 1e-5 and own > 0.1

    # The same measurement sees a leak: one boundary for the whole row, everything else as it was
    monkeypatch.setattr(packing, "boundary_arguments", lambda cu, _: boundary_arguments(cu[[0, -1]], int(cu[-1])))
    others, _ = log_probs_after_changing_row(packed, batch, 0)
    assert others > 1e-2


# (prompt, chosen, rejected) tokens of each pair; OLMo 3's windows hold 8 tokens
PROMPTS = {
    "long and short": [(20, 30, 1), (3, 1, 90), (12, 2, 140)],
    "a prompt of one token": [(1, 5, 9), (9, 1, 1)],
    "prompts that differ": [(20, 4, 7), (15, 30, 6)],  # the first pair's, from token 11 on
}


def make_pairs(pairs, differ=None):
    """TRL's batch in which the rows i and B + i begin with the same prompt; `differ` changes a token of row B."""
    batch = make_batch([(p, c) for p, c, _ in pairs] + [(p, r) for p, _, r in pairs])
    for i, (prompt, _, _) in enumerate(pairs):
        batch["input_ids"][len(pairs) + i, :prompt] = batch["input_ids"][i, :prompt]
    if differ is not None:
        batch["input_ids"][len(pairs), differ] += 1
    return batch


def one_by_one(model, batch, weights):
    """Log-probs [rows, L - 1] by a plain forward of each sequence alone, and gradients of their weighted sum."""
    expected = torch.zeros(weights.shape)
    model.zero_grad()
    for row, (ids, mask, labels) in enumerate(zip(*batch.values(), strict=True)):
        n = int(mask.sum())
        logps = torch.log_softmax(model(ids[None, :n]).logits[0, :-1], dim=-1).gather(1, ids[1:n, None])[:, 0]
        logps = logps * (labels[1:n] != -100)
        (logps * weights[row, : n - 1]).sum().backward()
        expected[row, : n - 1] = logps.detach()
    return expected, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_single_sequences(got, alone, batch):
    """What `run` gave is what the model `alone` computes of each sequence alone."""
    output, gradients = got
    weights = torch.linspace(-1, 1, output.log_probs.numel()).view_as(output.log_probs)
    expected, expected_gradients = one_by_one(alone, batch, weights)
    assert (output.log_probs - expected).abs().max() <= LOG_PROB_TOLERANCE
    difference = {name: gradients[name] - gradient for name, gradient in expected_gradients.items()}
    assert norm(difference) < GRADIENT_TOLERANCE * norm(expected_gradients)
    assert norm(gradients) == pytest.approx(norm(expected_gradients), rel=GRADIENT_TOLERANCE)


def shared_model(architecture, **kwargs):
    model = tiny_model(architecture, **({"router_aux_loss_coef": 0.0} if architecture == "olmoe" else {}), **kwargs)
    model.config.output_router_logits = False
    add_fused_lm_head(model, outputs=FIELDS)
    enable_padding_free(model, prefix_sharing=True)
    return model


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_prompts_change_neither_log_probs_nor_gradients(architecture, case):
    """Against each sequence alone, and against the row in which nothing is shared."""
    pairs = PROMPTS[case]
    batch = make_pairs(pairs, differ=11 if case == "prompts that differ" else None)
    model = shared_model(architecture)
    alone, unshared = padded_and_packed(architecture)
    unshared.config.output_router_logits = False
    computed = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: computed.append(args[0].shape[1]))
    got = run(model, batch)
    assert_single_sequences(got, alone, batch)
    assert_equal_runs(run(unshared, batch), got)
    shared = [prompt - 1 for prompt, _, _ in pairs]
    shared[0] = min(shared[0], 11) if case == "prompts that differ" else shared[0]
    assert computed == [int(batch["attention_mask"].sum()) - sum(shared)]


@pytest.mark.parametrize(  # each pair of values
    ("architecture", "sharing", "lora", "use_reentrant"),
    [
        ("gpt_neox", False, False, True),
        ("gpt_neox", True, True, False),
        ("olmo3", False, True, True),
        ("olmo3", True, False, False),
        ("llama", False, False, False),
        ("llama", True, True, True),
    ],
)
def test_gradient_checkpointing_recomputes_with_the_same_boundaries(architecture, sharing, lora, use_reentrant):
    """Though another batch runs between forward and backward. Against the padded path without checkpointing."""
    batch = make_pairs(PROMPTS["long and short"])
    models = list(padded_and_packed(architecture))
    if sharing:
        models[1] = shared_model(architecture)
    if lora:
        for i, model in enumerate(models):
            torch.manual_seed(0)
            models[i] = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    expected = run(models[0], batch)
    model = models[1].train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    first = model(**batch, fused_lm_head=True)
    model(**make_pairs([(5, 60, 2), (2, 9, 4)]), fused_lm_head=True).log_probs.sum().backward()
    weights = torch.linspace(-1, 1, first.log_probs.numel()).view_as(first.log_probs)
    model.zero_grad()
    (first.log_probs * weights).sum().backward()
    assert_equal_runs(expected, (first, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_rows_that_share_nothing_are_computed_as_they_are(padding_side):
    batch = make_batch(BATCHES["very unequal"], padding_side)
    assert_equal_runs(run(padded_and_packed("olmo3")[0], batch), run(shared_model("olmo3"), batch))


def test_a_model_with_state_along_the_sequence_is_refused():
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    add_fused_lm_head(model)
    with pytest.raises(UserError, match=r"'mamba': .*convolutions.*; set padding_free: false$"):
        enable_padding_free(model)


def test_inputs_it_cannot_pack_are_refused():
    _, packed = padded_and_packed("llama")
    batch = make_batch(BATCHES["one pair"])
    with pytest.raises(ValueError, match="'token_type_ids'"):
        packed(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]), fused_lm_head=True)
