"""Do two code paths compute the same? One batch, the same weights, several ways through the model.

Everything measured goes through the trainer that trains: its collator, its packing, its loss. The reference is eager
attention in fp32, padded, all pairs in one forward; each variant differs from it in what its name says. What the
figures mean, rounding or a bug, is for rounding.py to say.
"""

import contextlib
import gc
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers.utils import is_flash_attn_2_available

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.config_checks import nearest
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.health.preflight import check_vocabulary
from sfm_dpo.model.loading import load_model_config, model_init_kwargs
from sfm_dpo.train.metrics import loss_scale
from sfm_dpo.train.trainer import SFMDPOTrainer

FACTOR = 8.0
SCALING = 32.0
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


def rounding_level(reference: Any, rounded: Any) -> dict[str, float]:
    """How far rounding takes the reference path from itself: parity.Measured of the two. Never below one roundoff."""
    level = log_prob_difference(reference.logps, rounded.logps)
    size = torch.cat(reference.logps).abs()
    unit = ROUNDOFF[rounded.variant.dtype]
    level = {"max": max(level["max"], unit * size.max().item()), "mean": max(level["mean"], unit * size.mean().item())}
    if reference.gradients:
        layers = gradient_difference(reference.gradients, rounded.gradients)
        level["gradient"] = max(max(layer["relative"] for layer in layers.values()), unit)
    if reference.after:
        level["after"] = max(log_prob_difference(reference.after, rounded.after)["mean"], level["mean"])
    return level


def log_prob_difference(expected: list[torch.Tensor], got: list[torch.Tensor]) -> dict[str, float]:
    """Over the tokens of all sequences that count in either, in nats per token."""
    a, b = torch.cat(expected), torch.cat(got)
    gap = (a - b).abs()[(a != 0) | (b != 0)]
    return {"max": gap.max().item(), "mean": gap.mean().item()} if len(gap) else {"max": 0.0, "mean": 0.0}


def gradient_difference(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> dict[str, dict]:
    """By layer: norms, cosine, and |got - expected| / |expected|."""
    sums: dict[str, list[float]] = {}
    for name, a in expected.items():
        a, b = a.double(), got[name].double() if name in got else torch.zeros_like(a, dtype=torch.double)
        parts = ((a * a).sum(), (b * b).sum(), (a * b).sum(), ((a - b) ** 2).sum())
        total = sums.setdefault(layer_of(name), [0.0] * 4)
        for i, part in enumerate(parts):
            total[i] += part.item()
    return {
        layer: {
            "norm": math.sqrt(bb),
            "expected_norm": math.sqrt(aa),
            "cosine": ab / math.sqrt(aa * bb) if aa and bb else float(aa == bb),
            "relative": math.sqrt(gap / aa) if aa else float(gap > 0),
        }
        for layer, (aa, bb, ab, gap) in sums.items()
    }


def layer_of(parameter: str) -> str:
    """`layer 3` of model.layers.3.mlp.up_proj.weight; for what stands outside the layers its module's name."""
    number = re.search(r"\.(\d+)\.", parameter)
    return f"layer {number[1]}" if number else parameter.split(".")[-2]


def judge(reference: Any, measured: Any, levels: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Figures and verdict of a variant; `levels` by dtype, from rounding_level."""
    out: dict[str, Any] = {"dtype": measured.variant.dtype, "loss": measured.loss}
    tokens = wrong_tokens(measured.logps, measured.expected)
    if tokens:
        out |= {"verdict": "bug", "why": tokens}
    if [len(row) for row in measured.logps] != [len(row) for row in reference.logps]:
        return out | {"verdict": "bug", "why": tokens or "sequences have other lengths than those of the reference"}
    if not all(torch.isfinite(row).all() for row in (*measured.logps, *measured.after, *measured.gradients.values())):
        return out | {"verdict": "bug", "why": "a log-prob or a gradient is not finite"}
    level = levels[measured.variant.dtype]
    logps = log_prob_difference(reference.logps, measured.logps)
    out |= {"logps": logps}
    times = {"log-probs, mean": logps["mean"] / level["mean"], "log-probs, max": logps["max"] / level["max"]}
    if measured.gradients and reference.gradients:
        layers = gradient_difference(reference.gradients, measured.gradients)
        worst = max(layers, key=lambda name: layers[name]["relative"])
        norms = [math.sqrt(sum(layer[key] ** 2 for layer in layers.values())) for key in ("expected_norm", "norm")]
        out["gradient"] = {
            "norm": norms[1],
            "expected_norm": norms[0],
            "cosine": min(layer["cosine"] for layer in layers.values()),
            "worst": worst,
            "layers": layers,
        }
        times[f"gradient of {worst}"] = layers[worst]["relative"] / level["gradient"]
    if measured.after and reference.after:
        out["after"] = log_prob_difference(reference.after, measured.after)
        times["log-probs after the steps"] = out["after"]["mean"] / level["after"]
    what = max(times, key=times.__getitem__)
    out["times_rounding"] = times[what]
    if tokens:
        return out
    if measured.variant.dtype == "bfloat16":
        expected = levels["float32"]["mean"] * ROUNDOFF["bfloat16"] / ROUNDOFF["float32"]
        if level["mean"] > SCALING * expected:
            why = f"bf16 is off by {level['mean']:.1e} a token where fp32's rounding makes one expect {expected:.1e}"
            return out | {"verdict": "bug", "why": why}
    if times[what] > FACTOR:
        why = f"{what}: {times[what]:,.0f} times rounding" + where(reference, measured, level)
        return out | {"verdict": "bug", "why": why}
    by_layer = out["gradient"]["layers"] if "gradient" in out else {}
    exact = logps["max"] == 0 and all(layer["relative"] == 0 for layer in by_layer.values())
    verdict = "equal" if exact else "rounding"
    return out | {"verdict": verdict, "why": f"at most {times[what]:.1f} times rounding ({what})"}


def wrong_tokens(logps: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    """Rule 1, in words, or None. A log-prob of exactly 0 is a certain token, or one that does not count."""
    if [len(row) for row in logps] != [len(row) for row in expected]:
        return "sequences have other lengths than their token ids"
    counted, meant = torch.cat(logps) != 0, torch.cat(expected)
    extra, missing = int((counted & ~meant).sum()), int((~counted & meant).sum())
    prompts = int((~meant).sum())
    if extra and extra == prompts:
        return f"the prompt's tokens count in the loss ({extra} of {prompts})"
    if extra and missing:
        return f"the mask is off: {extra} tokens outside the response count, {missing} of it do not"
    if extra:
        return f"{extra} tokens outside the response count in the loss: the mask is off"
    # A model may be certain of single tokens; of the same token of most responses it is not
    if missing * 2 >= len(expected):
        return f"{missing} tokens of the responses do not count: the mask is off"
    return None


def where(reference: Any, measured: Any, level: dict[str, float]) -> str:
    """Which sequences are off: with leaking boundaries all but the first of a row."""
    gaps = [(a - b).abs() for a, b in zip(reference.logps, measured.logps, strict=True)]
    gaps = [gap[meant] for gap, meant in zip(gaps, measured.expected, strict=True) if meant.any()]
    off = [gap.mean().item() > FACTOR / 2 * level["mean"] or gap.max().item() > FACTOR * level["max"] for gap in gaps]
    first_is_right = not off[0] and gaps[0].mean().item() < 2 * level["mean"]
    if measured.variant.attention == "packed" and first_is_right and sum(off) > len(off[1:]) / 2:
        return f"; the first sequence of the row is right, {sum(off)} of {len(off) - 1} later ones are not: boundaries"
    return f"; {sum(off)} of {len(off)} sequences are off" if any(off) else ""


WORDS: dict[str, dict[str, Any]] = {  # of a variant's name, joined by +: what each changes
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "padded": {"attention": "sdpa"},
    "packed": {"attention": "packed"},
    "flash": {"attention": "flash_attention_2"},
    "separate": {"separate": True},
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "compile": {"compiled": True},
    "rope_gpu": {"rope": True},
}
DEFAULT_VARIANTS = "padded packed separate batch_1 compile rope_gpu bf16 packed+bf16 flash+bf16".split()


@dataclass(frozen=True)
class Variant:
    """A way to compute a batch. `batch`: pairs in one forward, None for all; `dtype` bfloat16 is autocast.

    `nudged`, which has no word: every weight moved by its last bit, to see what rounding is worth (rounding.py).
    """

    name: str
    attention: str = "eager"
    separate: bool = False
    batch: int | None = None
    dtype: str = "float32"
    compiled: bool = False
    rope: bool = False
    nudged: bool = False


def parse_variant(name: str) -> Variant:
    """`packed+bf16` and the like. Raises UserError for an unknown word."""
    variant = Variant(name)
    for word in name.split("+"):
        batch = re.fullmatch(r"batch_([1-9]\d*)", word)
        if not batch and word not in WORDS:
            raise UserError(
                f"--variants {name}: unknown word {word!r}{nearest(word, set(WORDS))}; the words are "
                f"{', '.join(WORDS)}, batch_N, joined by +"
            )
        variant = replace(variant, **({"batch": int(batch[1])} if batch else WORDS[word]))
    return variant


def why_skipped(variant: Variant) -> str | None:
    """Why a variant cannot be computed on this machine."""
    gpu = torch.cuda.is_available()
    if variant.rope and not gpu:
        return "no GPU is visible: RoPE frequencies can be made on the CPU only"
    if variant.attention == "flash_attention_2":
        if not gpu or not is_flash_attn_2_available():
            return "flash-attn is not installed" if gpu else "no GPU is visible: flash-attn has no CPU kernel"
        if variant.dtype not in ("bfloat16", "float16"):
            return "flash-attn computes in 16 bit only; ask for flash+bf16"
    return None


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
    chosen, rejected = (beta * gaps / loss_scale(mask, loss_type)).chunk(2)
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


def as_text(result: dict[str, Any]) -> str:
    """What was computed, the rounding that was measured, the variants, and the layers that are farthest off."""
    tokens, steps = result["tokens"], result["steps"]
    lines = [
        f"{result['model']} on {result['device']}: {result['pairs']} pairs, sequences of {min(tokens)} to "
        f"{max(tokens)} tokens, {result['response_tokens']:,} response tokens",
        f"reference: eager, fp32, padded, one forward: {result['reference']['verdict']}",
    ]
    if result["reference"]["verdict"] == "bug":
        lines[-1] += f": {result['reference']['why']}"
    for dtype, level in result["levels"].items():
        gradient = f", gradient {level['gradient']:.1e} of its norm" if "gradient" in level else ""
        lines.append(
            f"rounding of {dtype}: log-probs max {level['max']:.1e}, mean {level['mean']:.1e} nats a token{gradient}"
        )
    after = f"after {steps} step{'s' * (steps != 1)}"
    head = ["variant", "logp max", "logp mean", "grad norm", "cosine", after, "step 0", "x rounding", "verdict"]
    rows = [head]
    for row in result["variants"]:
        if row["verdict"] == "skipped" or "logps" not in row:
            rows.append([row["variant"], *["-"] * 7, f"{row['verdict']}: {row['why']}"])
            continue
        gradient = row.get("gradient")
        rows.append(
            [
                row["variant"],
                f"{row['logps']['max']:.1e}",
                f"{row['logps']['mean']:.1e}",
                f"{gradient['norm']:.5g}" if gradient else "-",
                f"{gradient['cosine']:.6f}" if gradient else "-",
                f"{row['after']['max']:.1e}" if "after" in row else "-",
                f"{row['step_0']:.1e}" if "step_0" in row else "-",
                f"{row['times_rounding']:,.1f}",
                row["verdict"] + (f": {row['why']}" if row["verdict"] == "bug" else ""),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines.append("")
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]))
    lines.append("")
    lines.append(
        "logp: nats a token against the reference; cosine: of the gradient in the layer farthest off; step 0: how far "
        f"the loss is from ln 2 with a\nreference cache made by eager in the same precision; a bug: over {FACTOR:g} "
        "times rounding, or a token that should not count"
    )
    for row in result["variants"]:
        if row["verdict"] == "bug" and "gradient" in row:
            layers = row["gradient"]["layers"]
            shown = "; ".join(
                f"{name} norm {layer['norm']:.4g} ({layer['expected_norm']:.4g}), cosine {layer['cosine']:.4f}"
                for name, layer in layers.items()
            )
            lines.append(f"{row['variant']}, gradient by layer: {shown}")
    return "\n".join(lines)
