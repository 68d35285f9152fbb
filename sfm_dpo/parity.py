"""Do two code paths compute the same? One batch, the same weights, several ways through the model.

Everything measured goes through the trainer that trains: its collator, its packing, its loss. The reference is eager
attention in fp32, padded, all pairs in one forward; each variant differs from it in what its name says. What the
figures mean, rounding or a bug, is for rounding.py to say.
"""

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset

from sfm_dpo.config import parse_config
from sfm_dpo.errors import UserError
from sfm_dpo.model import load_model_config, model_init_kwargs
from sfm_dpo.preflight import check_vocabulary
from sfm_dpo.rewards import scale
from sfm_dpo.rounding import judge, rounding_level
from sfm_dpo.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.trainer import SFMDPOTrainer
from sfm_dpo.variants import Variant, parse_variant, why_skipped


@dataclass
class Measured:
    """What a variant computed. Sequences: chosen of all pairs, then rejected.

    `logps` and `after` (after the optimizer steps) hold a tensor [tokens - 1] a sequence, float64 on CPU: the log-prob
    of each next token, 0 where it does not count. `gradients`: by parameter, on CPU.
    """

    variant: Variant
    logps: list[torch.Tensor]
    expected: list[torch.Tensor]  # [tokens - 1] bool: the response's tokens, from the token ids alone
    loss: float
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    after: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Batch:
    """The pairs that every variant computes, and what makes a trainer for them."""

    argv: list[str]
    rows: Dataset
    tokenizer: Any


def load_batch(argv: list[str], pairs: int, folder: str) -> Batch:
    """`pairs` of the recipe's training pairs, drawn with its seed, with placeholders for the reference's log-probs."""
    own = ["--output_dir", folder, "--report_to", "none", "--eval_fraction", "0", "--eval_strategy", "no"]
    own += ["--guard_generations", "0", "--bf16", "false", "--fp16", "false", "--dtype", "float32"]
    own += ["--use_peft", "false", "--torch_compile", "false", "--padding_free", "false"]
    own += ["--global_batch_size", str(pairs), "--per_device_train_batch_size", str(pairs)]
    own += ["--precompute_ref_log_probs", "true"]  # no second model
    argv = [*argv, *own]
    config = parse_config(argv, world_size=1)
    tokenizer = load_tokenizer(config)
    tokens = load_token_pairs(config, tokenizer)[0].train
    check_vocabulary(tokens, tokenizer, load_model_config(config).get_text_config().vocab_size)
    if len(tokens) < pairs:
        raise UserError(f"--pairs {pairs}: the dataset has {len(tokens)}")
    chosen = np.sort(np.random.default_rng(config.train.seed).permutation(len(tokens))[:pairs])
    return Batch(argv, tokens.select(chosen), tokenizer)


class _ParityTrainer(SFMDPOTrainer):
    """Keeps away from the cache of reference log-probs: what a broken variant computes must not be found there."""

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        return dataset


def make_trainer(batch: Batch, variant: Variant) -> SFMDPOTrainer:
    """The model loaded anew, in a trainer set up for the variant."""
    gc.collect()  # the last variant's model: a trainer is full of cycles, and two may not fit on a GPU
    torch.cuda.empty_cache()
    config = parse_config(batch.argv, world_size=1)
    args = config.train
    args.padding_free, args.torch_compile = variant.attention == "packed", variant.compiled
    args.torch_compile_backend = (args.torch_compile_backend or "inductor") if variant.compiled else None
    if variant.attention != "packed":  # which TRL would load as it is called, before we register it
        config.model.attn_implementation = variant.attention
    args.model_init_kwargs = model_init_kwargs(config)
    trainer = _ParityTrainer(
        model=config.model.model_name_or_path, args=args, train_dataset=batch.rows, processing_class=batch.tokenizer
    )
    trainer._step_0_checked = True  # it would stop at what this is here to find
    return trainer


def measure(batch: Batch, variant: Variant, steps: int = 1, gradients: bool = True) -> Measured:
    """Loads the model anew, computes the batch, its gradients, and `steps` of AdamW with the recipe's lr."""
    trainer = make_trainer(batch, variant)
    args = trainer.args
    model = trainer.model.to(trainer.accelerator.device).train()
    if variant.nudged:
        nudge(model)
    if variant.rope:
        remake_rope(model, trainer.accelerator.device)
    measured = Measured(variant, [], expected_tokens(batch.rows, args.max_length), 0.0)
    reference: list[tuple] = []

    def backward() -> float:
        total = 0.0
        for n, inputs in enumerate(micro_batches(trainer, variant)):
            with precision(trainer, variant):
                if len(reference) <= n:  # log-probs of the base model, by the same path
                    reference.append(trainer.compute_ref_log_probs(through(model, variant, []), inputs))
                inputs = inputs | dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference[n], strict=True))
                loss = trainer.compute_loss(through(model, variant, []), inputs)
            loss = loss * (len(inputs["input_ids"]) / 2 / len(batch.rows))
            loss.backward()
            total += loss.item()
        return total

    measured.logps = log_probs(trainer, model, variant)
    if gradients:
        measured.loss = backward()
        measured.gradients = {
            name: p.grad.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer = torch.optim.AdamW(
            model.parameters(), args.learning_rate, (args.adam_beta1, args.adam_beta2), args.adam_epsilon, 0.0
        )
        for step in range(steps):
            if step:
                backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        measured.after = log_probs(trainer, model, variant) if steps else []
    return measured


def micro_batches(trainer: SFMDPOTrainer, variant: Variant) -> Iterator[dict[str, torch.Tensor]]:
    """The rows as the trainer's collator puts them together, `variant.batch` pairs at a time."""
    dataset = trainer.train_dataset
    size = variant.batch or len(dataset)
    for start in range(0, len(dataset), size):
        rows = [dataset[i] for i in range(start, min(start + size, len(dataset)))]
        yield trainer._prepare_inputs(trainer.data_collator(rows))


@torch.no_grad()
def log_probs(trainer: SFMDPOTrainer, model, variant: Variant) -> list[torch.Tensor]:
    """[tokens - 1] of every sequence, chosen of all pairs before rejected; see Measured."""
    chosen, rejected = [], []
    for inputs in micro_batches(trainer, variant):
        seen: list[torch.Tensor] = []
        with precision(trainer, variant):
            trainer.compute_ref_log_probs(through(model, variant, seen), inputs)
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        rows = [row[: n - 1].double().cpu() for row, n in zip(seen[0], lengths, strict=True)]
        chosen += rows[: len(rows) // 2]
        rejected += rows[len(rows) // 2 :]
    return chosen + rejected


def precision(trainer: SFMDPOTrainer, variant: Variant):
    """fp32 weights and bf16 arithmetic, as the Trainer's `bf16: true`; else nothing."""
    if variant.dtype != "bfloat16":
        return contextlib.nullcontext()
    return torch.autocast(trainer.accelerator.device.type, torch.bfloat16)


def through(model, variant: Variant, seen: list[torch.Tensor]):
    """`model` as TRL calls it, or chosen and rejected in forwards of their own; appends the log-probs to `seen`."""

    def forward(**kwargs):
        output = _separate(model, **kwargs) if variant.separate else model(**kwargs)
        seen.append(output.log_probs.detach())
        return output

    return forward


def _separate(model, *, input_ids, attention_mask, labels, **kwargs):
    """Each side padded to its own longest sequence, as code that does not concatenate them does."""
    halves, width = [], input_ids.shape[1]
    for ids, mask, targets in zip(*(t.chunk(2) for t in (input_ids, attention_mask, labels)), strict=True):
        n = int(mask.sum(dim=1).max())
        halves.append(model(input_ids=ids[:, :n], attention_mask=mask[:, :n], labels=targets[:, :n], **kwargs))
    joined = halves[0]
    for name, value in list(joined.items()):
        other = halves[1][name]
        if value.dim() == 2:
            joined[name] = torch.cat([F.pad(v, (0, width - 1 - v.shape[1])) for v in (value, other)])
        else:
            joined[name] = (value + other) / 2
    return joined


@torch.no_grad()
def nudge(model) -> None:
    """Moves each weight to a neighbouring floating-point number, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.bool).to(weight.device)
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype)))


def remake_rope(model, device: torch.device) -> None:
    """RoPE frequencies computed on `device`; from_pretrained computes them on the CPU and moves them."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            with device:  # of the classes in transformers 5.23 not all take a device
                made = type(module)(config=module.config)
            for name, buffer in made.named_buffers():
                setattr(module, name, buffer)


def expected_tokens(rows: Dataset, max_length: int | None) -> list[torch.Tensor]:
    """[tokens - 1] bool a sequence, chosen before rejected: which next tokens are the response's, after truncation."""
    expected = []
    for side in ("chosen_ids", "rejected_ids"):
        for row in rows:
            prompt, total = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row[side])
            expected.append(torch.arange(min(total, max_length or total) - 1) >= prompt - 1)
    return expected


def margins(measured: Measured, reference: list[torch.Tensor], loss_type: str, beta: float) -> float:
    """Mean |margin| / 2 over the pairs, which is how far the loss of step 0 is from ln 2, with this reference."""
    mask = torch.nn.utils.rnn.pad_sequence([e.long() for e in measured.expected], batch_first=True)
    gaps = torch.stack([(a.sum() - b.sum()) for a, b in zip(measured.logps, reference, strict=True)])
    chosen, rejected = (beta * gaps / scale(mask, loss_type)).chunk(2)
    return (chosen - rejected).abs().mean().item() / 2


def run_parity(argv: list[str], names: list[str], pairs: int = 4, steps: int = 1, gradients: bool = True) -> dict:
    """Computes the reference, what rounding is measured by, and the variants; returns plain types."""
    variants = [parse_variant(name) for name in names]
    with tempfile.TemporaryDirectory() as folder:  # the trainer wants an output_dir; nothing is kept in it
        batch = load_batch(argv, pairs, folder)
        config = parse_config(batch.argv, world_size=1)
        loss_type, beta = config.train.loss_type[0], config.train.beta
        todo = [variant for variant in variants if why_skipped(variant) is None]
        reference = measure(batch, parse_variant("eager"), steps, gradients)
        nudged = replace(parse_variant("eager"), nudged=True)
        levels = {"float32": rounding_level(reference, measure(batch, nudged, steps, gradients))}
        same = {"float32": reference}
        if any(variant.dtype == "bfloat16" for variant in todo):
            same["bfloat16"] = measure(batch, parse_variant("bf16"), steps, gradients)
            levels["bfloat16"] = rounding_level(reference, same["bfloat16"])
        results: list[dict[str, Any]] = []
        for variant in variants:
            reason = why_skipped(variant)
            if reason:
                results.append({"variant": variant.name, "verdict": "skipped", "why": reason})
                continue
            plain = variant == replace(parse_variant("bf16"), name=variant.name)
            measured = same["bfloat16"] if plain else measure(batch, variant, steps, gradients)
            results.append(judge(reference, measured, levels) | {"variant": variant.name})
            base = same[variant.dtype].logps
            if len(measured.logps) == len(base):
                results[-1]["step_0"] = margins(measured, base, loss_type, beta)
        checked = judge(reference, reference, levels)
    sequences = [len(e) + 1 for e in reference.expected]
    return {
        "model": config.model.model_name_or_path,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not config.train.use_cpu else "cpu",
        "pairs": pairs,
        "tokens": sequences,
        "response_tokens": int(sum(e.sum() for e in reference.expected)),
        "steps": steps if gradients else 0,
        "learning_rate": config.train.learning_rate,
        "reference": {"loss": reference.loss} | checked,
        "levels": levels,
        "variants": results,
    }
