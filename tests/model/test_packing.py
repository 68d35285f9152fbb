"""The packed forward equals the padded one: log-probs, gradients, metrics, for every loss, and nothing leaks."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, MambaConfig
from trl import DPOConfig, DPOTrainer
from trl.trainer.utils import add_fused_lm_head

import sfm_dpo.model.packing
from sfm_dpo.model.packing import enable_padding_free
from tests.tiny_models import ARCHITECTURES, tiny_config, tiny_model, tiny_tokenizer

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
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_the_padded_path(architecture, rows, padding_side):
    padded, packed = padded_and_packed(architecture, "eager" if padding_side == "right" else "sdpa")
    batch = make_batch(BATCHES[rows], padding_side)
    assert (batch["attention_mask"].sum() < batch["attention_mask"].numel()) == (rows != "no padding")
    assert_equal_runs(run(padded, batch), run(packed, batch))


def test_positions_restart_in_every_sequence():
    """GPT-2 has learned absolute positions; RoPE would not notice positions that go on counting."""
    results = []
    for packed in (False, True):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=93, attn_pdrop=0, embd_pdrop=0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        add_fused_lm_head(model, outputs=FIELDS)
        if packed:
            enable_padding_free(model)
        results.append(run(model, make_batch(BATCHES["very unequal"])))
    assert_equal_runs(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_checkpointing_recomputes_with_the_same_boundaries(architecture, use_reentrant):
    """Against the padded path without checkpointing. Another batch runs between forward and backward: boundaries kept
    outside the call would be those of the wrong batch when a layer is computed again."""
    padded, packed = padded_and_packed(architecture)
    batch = make_batch(BATCHES["very unequal"])
    if use_reentrant:
        # Captured inside a reentrant checkpoint, router logits have no gradient in any implementation of transformers
        for model in (padded, packed):
            model.config.output_router_logits = False
    expected = run(padded, batch)
    packed.train()
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        packed.enable_input_require_grads()
    first = packed(**batch, fused_lm_head=True)
    packed(**make_batch([(5, 60), (2, 9)]), fused_lm_head=True).log_probs.sum().backward()
    weights = torch.linspace(-1, 1, first.log_probs.numel()).view_as(first.log_probs)
    loss = (first.log_probs * weights).sum() + (100 * first.aux_loss if first.aux_loss is not None else 0)
    packed.zero_grad()
    loss.backward()
    assert_equal_runs(expected, (first, {name: p.grad for name, p in packed.named_parameters() if p.grad is not None}))


@pytest.mark.parametrize(("architecture", "use_reentrant"), [("gpt_neox", None), ("olmo3", False), ("llama", True)])
def test_lora_with_and_without_checkpointing(architecture, use_reentrant):
    batch = make_batch(BATCHES["very unequal"])
    results = []
    for model in padded_and_packed(architecture):
        torch.manual_seed(0)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        peft.train()
        if use_reentrant is not None:
            peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            peft.enable_input_require_grads()
        results.append(run(peft, batch))
        assert all("lora" in name for name in results[-1][1])
        with torch.inference_mode(), peft.disable_adapter():
            results[-1][0]["log_sum_sq_probs"] = peft(**batch, fused_lm_head=True).log_probs  # the reference's
    assert_equal_runs(*results)


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
    monkeypatch.setattr(
        sfm_dpo.model.packing,
        "boundary_mask",
        lambda cu, _: sfm_dpo.model.attention.boundary_mask(cu[[0, -1]], int(cu[-1])),
    )
    others, _ = log_probs_after_changing_row(packed, batch, 0)
    assert others > 1e-2


# ---- prefix sharing ----

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
    """Log-probs [rows, L - 1] by transformers' own forward of each sequence alone, and gradients of their weighted
    sum."""
    expected = torch.zeros(weights.shape)
    model.zero_grad()
    for row, (ids, mask, labels) in enumerate(zip(*batch.values(), strict=True)):
        n = int(mask.sum())
        logps = torch.log_softmax(model(ids[None, :n]).logits[0, :-1], dim=-1).gather(1, ids[1:n, None])[:, 0]
        logps = logps * (labels[1:n] != -100)
        (logps * weights[row, : n - 1]).sum().backward()
        expected[row, : n - 1] = logps.detach()
    return expected, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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
    model, unshared, alone = shared_model(architecture), *padded_and_packed(architecture)[::-1]
    unshared.config.output_router_logits = False
    computed = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: computed.append(args[0].shape[1]))
    output, gradients = run(model, batch)
    weights = torch.linspace(-1, 1, output.log_probs.numel()).view_as(output.log_probs)
    expected, expected_gradients = one_by_one(alone, batch, weights)
    assert (output.log_probs - expected).abs().max() <= LOG_PROB_TOLERANCE
    difference = {name: gradients[name] - gradient for name, gradient in expected_gradients.items()}
    assert norm(difference) < GRADIENT_TOLERANCE * norm(expected_gradients)
    assert norm(gradients) == pytest.approx(norm(expected_gradients), rel=GRADIENT_TOLERANCE)
    assert_equal_runs(run(unshared, batch), (output, gradients))
    shared = [prompt - 1 for prompt, _, _ in pairs]
    shared[0] = min(shared[0], 11) if case == "prompts that differ" else shared[0]
    assert computed == [int(batch["attention_mask"].sum()) - sum(shared)]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("architecture", ["gpt_neox", "olmo3", "llama"])
def test_shared_prompts_with_checkpointing_and_lora(architecture, lora, use_reentrant):
    batch, results = make_pairs(PROMPTS["long and short"]), []
    for model in (padded_and_packed(architecture)[0], shared_model(architecture)):
        torch.manual_seed(0)
        sharing = len(results) == 1
        if lora:
            config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            model = get_peft_model(model, config)
        model.train()
        if sharing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
            model(**make_pairs([(5, 60, 2), (2, 9, 4)]), fused_lm_head=True)  # boundaries are those of the call
        results.append(run(model, batch))
    assert_equal_runs(*results)


def test_a_shared_prompt_lets_no_answer_see_another():
    model = shared_model("olmo3")
    batch = make_pairs([(20, 30, 12), (9, 5, 7)])
    with torch.no_grad():
        before = model(**batch, fused_lm_head=True).log_probs
        changed = {name: tensor.clone() for name, tensor in batch.items()}
        changed["input_ids"][0, 20:50] = (batch["input_ids"][0, 20:50] + 100) % 250
        changed["labels"][0, 20:50] = changed["input_ids"][0, 20:50]
        after = model(**changed, fused_lm_head=True).log_probs
    assert (before - after)[1:].abs().max() < 1e-5 and (before - after)[0].abs().max() > 0.1


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_rows_that_share_nothing_are_computed_as_they_are(rows, padding_side):
    batch = make_batch(BATCHES[rows], padding_side)
    assert_equal_runs(run(padded_and_packed("olmo3")[0], batch), run(shared_model("olmo3"), batch))


# ---- through TRL's trainer: every loss, policy and reference ----

PAIRS = [
    ("What is 1+1?", "2", "It could be three, or perhaps four; who is to say what a number is, after all?"),
    ("Name a colour.", "", "Blue is one."),  # a response of one token: the end
    ("Hi", "Hello! How can I help you today? I am glad you came.", "Go away."),
    ("Repeat: abc", "abc", "cba cba cba"),
]
LOSSES = [
    *({"loss_type": [t]} for t in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot")),
    *({"loss_type": [t]} for t in ("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")),
    {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    {"loss_type": ["robust"], "label_smoothing": 0.1},
    {"loss_type": ["sigmoid"], "ld_alpha": 0.5},
    {"loss_type": ["sigmoid_norm"], "use_weighting": True},
    {"loss_type": ["sigmoid_norm"], "f_divergence_type": "forward_kl"},
    {"loss_type": ["sigmoid_norm"], "f_divergence_type": "js_divergence"},
    {"loss_type": ["sigmoid_norm"], "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
]


def make_trainer(tmp_path, architecture, packed, sharing=False, **args):
    defaults = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": len(PAIRS),
        "beta": 0.05,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "router_aux_loss_coef": 0.5 if architecture == "olmoe" else None,
    }
    trainer = DPOTrainer(
        model=tiny_model(architecture, seed=0),
        ref_model=tiny_model(architecture, seed=1),
        args=DPOConfig(**{**defaults, **args}),
        train_dataset=Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), p, strict=True)) for p in PAIRS]),
        processing_class=tiny_tokenizer(),
    )
    if packed:
        enable_padding_free(trainer.model, sharing)
        enable_padding_free(trainer.ref_model, sharing)
    return trainer


def loss_and_gradient_norm(trainer):
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), norm(gradients), metrics


@pytest.mark.parametrize(
    ("architecture", "loss"),
    [("olmoe", {"loss_type": ["sigmoid_norm"]}), *(("olmo3", loss) for loss in LOSSES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_every_loss_of_trl(tmp_path, architecture, loss):
    paths = (False, False), (True, False), *([(True, True)] if architecture == "olmo3" else [])
    stock, *others = (
        loss_and_gradient_norm(make_trainer(tmp_path, architecture, packed, sharing=sharing, **loss))
        for packed, sharing in paths
    )
    for packed in others:
        assert packed[0] == pytest.approx(stock[0], rel=1e-5, abs=1e-6)
        assert packed[1] == pytest.approx(stock[1], rel=GRADIENT_TOLERANCE) and stock[1] > 0
        assert packed[2] == pytest.approx(stock[2], rel=1e-4, abs=1e-5)  # every metric TRL logs
    assert ("aux_loss" in stock[2]) == (architecture == "olmoe")


# ---- what cannot be packed ----

SHAPE = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(**SHAPE, num_hidden_layers=1), "convolutions"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2), "its attention does not go through"),
        (tiny_config("gpt_neox", attention_dropout=0.1), "attention_dropout"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_cannot_be_packed_are_refused(config, reason):
    model = AutoModelForCausalLM.from_config(config)
    add_fused_lm_head(model)
    with pytest.raises(ValueError, match=rf"^[^\n]*'{config.model_type}'[^\n]*$") as error:
        enable_padding_free(model)
    assert reason in str(error.value)
    assert "set padding_free: false" in str(error.value)


def test_inputs_it_cannot_pack_are_refused():
    _, packed = padded_and_packed("llama")
    batch = make_batch(BATCHES["one pair"])
    with pytest.raises(ValueError, match="'token_type_ids'"):
        packed(**batch, token_type_ids=torch.zeros_like(batch["input_ids"]), fused_lm_head=True)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_padded_sdpa_on_cuda(architecture, dtype, tolerance, checkpointing):
    """fp32 runs SDPA by sequence, bf16 varlen_attn: against padded SDPA in fp32 on the same weights, packed bf16 is
    allowed what padded bf16 needs too (log-probs of these models move by about 0.1 from rounding alone)."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    padded, packed = (m.cuda().train() for m in padded_and_packed(architecture, initializer_range=0.05, **sizes))
    batch = make_batch(BATCHES["very unequal"], device="cuda")
    expected = run(padded, batch)
    packed.to(dtype)
    if checkpointing:
        packed.gradient_checkpointing_enable()
    output, gradients = run(packed, batch)
    torch.testing.assert_close(output.log_probs.float(), expected[0].log_probs, atol=tolerance, rtol=0)
    assert norm(gradients) == pytest.approx(norm(expected[1]), rel=tolerance)
