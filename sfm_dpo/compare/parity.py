"""Parity of code paths: one batch and the same weights through several forwards, their differences against rounding.

Everything is measured with the trainer that trains: its collator, its packing, its loss. The reference is eager
attention in fp32, padded, all pairs in one forward; each variant differs from it in what its name says.
docs/reproducibility.md states the rule by which a difference is rounding or a bug.
"""

import gc
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import is_flash_attn_2_available

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import parse_config
from sfm_dpo.config_checks import nearest
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.health.preflight import check_vocabulary
from sfm_dpo.model.loading import load_model_config, model_init_kwargs
from sfm_dpo.train.metrics import loss_scale
from sfm_dpo.train.trainer import SFMDPOTrainer

MAX_TIMES_ROUNDING = 8.0
MAX_BF16_SCALING = (
    32.0  # of the measured rounding of bf16, relative to that of fp32 times the ratio of their roundoffs
)
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}

# ---- variants

WORDS: dict[str, dict[str, Any]] = {  # of a variant's name, joined by +: the fields that each sets
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "padded": {"attention": "sdpa"},
    "packed": {"attention": "packed"},
    "flash": {"attention": "flash_attention_2"},
    "separate": {"separate": True},
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "compile": {"compiled": True},
    "rope_gpu": {"rope_gpu": True},
}
DEFAULT_VARIANTS = "padded packed separate batch_1 compile rope_gpu bf16 packed+bf16 flash+bf16".split()


@dataclass(frozen=True)
class Variant:
    """A way to compute a batch. `batch`: pairs in one forward, None for all; `dtype` bfloat16 is autocast.

    `nudged`, which has no word: every weight is moved by its last bit, to measure rounding.
    """

    name: str = field(compare=False)
    attention: str = "eager"
    separate: bool = False
    batch: int | None = None
    dtype: str = "float32"
    compiled: bool = False
    rope_gpu: bool = False
    nudged: bool = False


def parse_variant(name: str) -> Variant:
    """The variant of a name such as `packed+bf16`. Raises UserError for an unknown word."""
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


def find_obstacle(variant: Variant) -> str | None:
    """Why this machine cannot compute a variant; None if it can."""
    flash = variant.attention == "flash_attention_2"
    if (flash or variant.rope_gpu) and not torch.cuda.is_available():
        return "no GPU is visible"
    if flash and not is_flash_attn_2_available():
        return "flash-attn is not installed"
    if flash and variant.dtype == "float32":
        return "flash-attn computes in 16 bit only; ask for flash+bf16"
    return None


# ---- measuring


@dataclass
class Batch:
    """The pairs that every variant computes, and the arguments of its trainer.

    `response`: [tokens - 1] bool a sequence, chosen of all pairs before rejected: which next tokens are the
    response's, from the token ids alone.
    """

    argv: list[str]
    rows: Dataset
    tokenizer: Any
    response: list[torch.Tensor]


@dataclass
class Measurement:
    """What a variant computed.

    `logps` and, after the optimizer steps, `logps_after`: [tokens - 1] a sequence, in the order of Batch.response,
    float64 on CPU: the log-prob of each next token, 0 where it does not count. `gradients`: by parameter, on CPU.
    """

    variant: Variant
    response: list[torch.Tensor]  # Batch's
    logps: list[torch.Tensor]
    loss: float = 0.0
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    logps_after: list[torch.Tensor] = field(default_factory=list)


def load_batch(argv: list[str], pairs: int, output_dir: str) -> Batch:
    """`pairs` of the recipe's training pairs, drawn with its seed.

    Raises:
        UserError: the data set is smaller.
    """
    argv = [*argv, "--output_dir", output_dir, "--report_to", "none", "--eval_fraction", "0", "--eval_strategy", "no"]
    argv += ["--guard_generations", "0", "--bf16", "false", "--fp16", "false", "--dtype", "float32"]
    argv += ["--use_peft", "false", "--torch_compile", "false", "--padding_free", "false"]
    argv += ["--global_batch_size", str(pairs), "--per_device_train_batch_size", str(pairs)]
    argv += ["--precompute_ref_log_probs", "true"]  # no second model
    config = parse_config(argv, world_size=1)
    tokenizer = load_tokenizer(config)
    tokens = load_token_pairs(config, tokenizer)[0].train
    check_vocabulary(tokens, tokenizer, load_model_config(config).get_text_config().vocab_size)
    if len(tokens) < pairs:
        raise UserError(f"--pairs {pairs}: the dataset has {len(tokens)}")
    rows = tokens.select(np.sort(np.random.default_rng(config.train.seed).permutation(len(tokens))[:pairs]))
    response = []
    for side in ("chosen_ids", "rejected_ids"):
        for row in rows:
            length = min(len(row["prompt_ids"]) + len(row[side]), config.train.max_length or math.inf)
            response.append(torch.arange(length - 1) >= len(row["prompt_ids"]) - 1)
    return Batch(argv, rows, tokenizer, response)


class ParityTrainer(SFMDPOTrainer):
    """The trainer of a variant, with the model loaded anew. It reads and writes no cache of reference log-probs."""

    def __init__(self, batch: Batch, variant: Variant):
        gc.collect()  # the last variant's model: a trainer is full of cycles, and two may not fit on a GPU
        torch.cuda.empty_cache()
        config = parse_config(batch.argv, world_size=1)
        args = config.train
        args.padding_free, args.torch_compile = variant.attention == "packed", variant.compiled
        args.torch_compile_backend = (args.torch_compile_backend or "inductor") if variant.compiled else None
        if variant.attention != "packed":  # TRL would load it by that name, before it is registered
            config.model.attn_implementation = variant.attention
        args.model_init_kwargs = model_init_kwargs(config)
        model = config.model.model_name_or_path
        super().__init__(model=model, args=args, train_dataset=batch.rows, processing_class=batch.tokenizer)
        self.step_0_checked = True  # the check would stop at what is to be measured
        self.variant = variant
        # fp32 weights and bf16 arithmetic, as the Trainer's `bf16: true`
        device, bf16 = self.accelerator.device, variant.dtype == "bfloat16"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        self.model.to(device).train()
        if variant.nudged:
            nudge_weights(self.model)
        if variant.rope_gpu:
            recompute_rope(self.model, device)

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        return dataset

    def micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """The rows as the trainer's collator puts them together, `variant.batch` pairs at a time."""
        rows = list(self.train_dataset)
        size = self.variant.batch or len(rows)
        for start in range(0, len(rows), size):
            yield self._prepare_inputs(self.data_collator(rows[start : start + size]))

    def forward(self, **inputs: Any):
        """The variant's forward, as TRL calls the model; keeps the log-probs, [2B, L - 1]."""
        output = run_separately(self.model, **inputs) if self.variant.separate else self.model(**inputs)
        self.log_probs = output.log_probs.detach()
        return output

    def compute_logps(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Per-token log-probs as in Measurement, and by micro-batch the sums [B] of chosen and of rejected."""
        chosen, rejected, sums = [], [], []
        for inputs in self.micro_batches():
            with self.autocast:
                sums.append(self.compute_ref_log_probs(self.forward, inputs))
            lengths = inputs["attention_mask"].sum(dim=1).tolist()
            rows = [row[: n - 1].double().cpu() for row, n in zip(self.log_probs, lengths, strict=True)]
            chosen += rows[: len(rows) // 2]
            rejected += rows[len(rows) // 2 :]
        return chosen + rejected, sums

    def accumulate_gradients(self, reference: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Backward of the mean loss over all pairs, which it returns. `reference`: sums from `compute_logps`."""
        total = 0.0
        for inputs, (chosen, rejected) in zip(self.micro_batches(), reference, strict=True):
            inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
            with self.autocast:
                loss = self.compute_loss(self.forward, inputs) * (len(chosen) / len(self.train_dataset))
            loss.backward()
            total += loss.item()
        return total


def measure_variant(batch: Batch, variant: Variant, steps: int = 1, gradients: bool = True) -> Measurement:
    """Loads the model anew, computes the batch, its gradients, and `steps` of the recipe's optimizer."""
    trainer = ParityTrainer(batch, variant)
    logps, reference = trainer.compute_logps()
    if not gradients:
        return Measurement(variant, batch.response, logps)
    model, loss = trainer.model, trainer.accumulate_gradients(reference)
    grads = {name: p.grad.to("cpu", copy=True) for name, p in model.named_parameters() if p.grad is not None}
    optimizer = trainer.create_optimizer()
    for step in range(steps):
        if step:
            trainer.accumulate_gradients(reference)
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    logps_after = trainer.compute_logps()[0] if steps else []
    return Measurement(variant, batch.response, logps, loss, grads, logps_after)


def run_separately(model, *, input_ids, attention_mask, labels, **kwargs):
    """Chosen and rejected in forwards of their own, each padded to its own longest sequence."""
    halves, width = [], input_ids.shape[1]
    for ids, mask, targets in zip(*(t.chunk(2) for t in (input_ids, attention_mask, labels)), strict=True):
        n = int(mask.sum(dim=1).max())
        halves.append(model(input_ids=ids[:, :n], attention_mask=mask[:, :n], labels=targets[:, :n], **kwargs))
    output, other = halves
    for name, value in list(output.items()):
        if value.dim() == 2:  # per token
            output[name] = torch.cat([F.pad(v, (0, width - 1 - v.shape[1])) for v in (value, other[name])])
        else:
            output[name] = (value + other[name]) / 2
    return output


@torch.no_grad()
def nudge_weights(model) -> None:
    """Moves each weight to a neighbouring floating-point number, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.bool).to(weight.device)
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype)))


def recompute_rope(model, device: torch.device) -> None:
    """RoPE frequencies computed on `device`; from_pretrained computes them on the CPU and moves them."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            with device:  # not all classes of transformers 5.23 take a device
                new = type(module)(config=module.config)
            for name, buffer in new.named_buffers():
                setattr(module, name, buffer)


# ---- judging


def compare_logps(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> dict[str, float]:
    """Largest and mean difference in nats a token, over the tokens of all sequences that count in either."""
    a, b = torch.cat(expected), torch.cat(actual)
    gap = (a - b).abs()[(a != 0) | (b != 0)]
    return {"max": gap.max().item(), "mean": gap.mean().item()} if len(gap) else {"max": 0.0, "mean": 0.0}


def compare_gradients(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> dict[str, dict]:
    """By layer: norms, cosine, and |actual - expected| / |expected|.

    A layer is `layer 3` for model.layers.3.mlp.up_proj.weight; outside the layers it has its module's name.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    for name in expected:
        number = re.search(r"\.(\d+)\.", name)
        layers[f"layer {number[1]}" if number else name.split(".")[-2]].append(name)
    rows = {}
    for layer, names in layers.items():
        zeros = {name: torch.zeros_like(expected[name]) for name in names}
        a, b = (torch.cat([(zeros | g)[name].flatten() for name in names]).double() for g in (expected, actual))
        expected_norm, norm, gap = a.norm().item(), b.norm().item(), (a - b).norm().item()
        product = norm * expected_norm
        rows[layer] = {
            "norm": norm,
            "expected_norm": expected_norm,
            "cosine": (a @ b).item() / product if product else float(gap == 0),
            "relative": gap / expected_norm if expected_norm else float(gap > 0),
        }
    return rows


def compare_measurements(reference: Measurement, other: Measurement) -> tuple[dict[str, Any], dict[str, float]]:
    """Figures for --json, and those that are judged: {max, mean, gradient, after}, as far as they were measured."""
    logps = compare_logps(reference.logps, other.logps)
    figures: dict[str, Any] = {"logps": logps}
    judged = dict(logps)
    if other.gradients:
        layers = compare_gradients(reference.gradients, other.gradients)
        worst = max(layers, key=lambda name: layers[name]["relative"])
        figures["gradient"] = {
            "norm": math.hypot(*(layer["norm"] for layer in layers.values())),
            "expected_norm": math.hypot(*(layer["expected_norm"] for layer in layers.values())),
            "cosine": min(layer["cosine"] for layer in layers.values()),
            "worst": worst,
            "layers": layers,
        }
        judged["gradient"] = layers[worst]["relative"]
    if other.logps_after:
        figures["after"] = compare_logps(reference.logps_after, other.logps_after)
        judged["after"] = figures["after"]["mean"]
    return figures, judged


def measure_rounding(reference: Measurement, rounded: Measurement) -> dict[str, float]:
    """How far rounding takes the reference path from itself, for each judged figure; never below one roundoff."""
    level, size = compare_measurements(reference, rounded)[1], torch.cat(reference.logps).abs()
    unit = ROUNDOFF[rounded.variant.dtype]
    mean = max(level["mean"], unit * size.mean().item())
    lowest = {"max": unit * size.max().item(), "mean": mean, "gradient": unit, "after": mean}
    return {figure: max(value, lowest[figure]) for figure, value in level.items()}


def judge_variant(reference: Measurement, measurement: Measurement, levels: dict[str, dict]) -> dict[str, Any]:
    """Figures and verdict; `levels` by dtype, from measure_rounding."""
    variant, level = measurement.variant, levels[measurement.variant.dtype]
    row: dict[str, Any] = {"dtype": variant.dtype, "loss": measurement.loss}
    if [len(logps) for logps in measurement.logps] != [len(mask) for mask in measurement.response]:
        return row | {"verdict": "bug", "why": "sequences have other lengths than their token ids"}
    tensors = (*measurement.logps, *measurement.logps_after, *measurement.gradients.values())
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        return row | {"verdict": "bug", "why": "a log-prob or a gradient is not finite"}
    figures, judged = compare_measurements(reference, measurement)
    times = {figure: value / level[figure] for figure, value in judged.items()}
    largest = max(times, key=times.__getitem__)
    labels = {"max": "log-probs, max", "mean": "log-probs, mean", "after": "log-probs after the steps"}
    label = labels.get(largest) or f"gradient of {figures['gradient']['worst']}"
    row |= figures | {"times_rounding": times[largest]}

    why = find_wrong_tokens(measurement)
    bf16 = levels["float32"]["mean"] * ROUNDOFF["bfloat16"] / ROUNDOFF["float32"]
    if not why and variant.dtype == "bfloat16" and level["mean"] > MAX_BF16_SCALING * bf16:
        why = f"bf16 is off by {level['mean']:.1e} a token where the rounding of fp32 makes one expect {bf16:.1e}"
    if not why and times[largest] > MAX_TIMES_ROUNDING:
        why = f"{label}: {times[largest]:,.0f} times rounding{locate_difference(reference, measurement, level)}"
    if why:
        return row | {"verdict": "bug", "why": why}
    verdict = "rounding" if any(times.values()) else "equal"
    return row | {"verdict": verdict, "why": f"at most {times[largest]:.1f} times rounding ({label})"}


def find_wrong_tokens(measurement: Measurement) -> str | None:
    """What is wrong with the tokens that count. A log-prob of exactly 0 does not count, or is of a certain token."""
    counts, should = torch.cat(measurement.logps) != 0, torch.cat(measurement.response)
    extra, missing = int((counts & ~should).sum()), int((~counts & should).sum())
    # A model may be certain of single tokens; of the same token of most responses it is not
    if not extra and missing * 2 < len(measurement.response):
        return None
    what = "the prompt's tokens count in the loss" if extra == int((~should).sum()) else "the mask is off"
    return f"{what}: {extra} tokens outside the response count, {missing} of it do not count"


def locate_difference(reference: Measurement, measurement: Measurement, level: dict[str, float]) -> str:
    """Which sequences are off, in words: with leaking boundaries all but the first of a row."""
    off = []
    for a, b, mask in zip(reference.logps, measurement.logps, measurement.response, strict=True):
        gap = (a - b).abs()[mask] / MAX_TIMES_ROUNDING
        off.append(bool(len(gap)) and (gap.mean() > level["mean"] / 2 or gap.max() > level["max"]).item())
    later = sum(off[1:])
    if measurement.variant.attention == "packed" and not off[0] and later > len(off[1:]) / 2:
        return f"; the first sequence of the row is right, {later} of {len(off) - 1} later ones are not: boundaries"
    return f"; {sum(off)} of {len(off)} sequences are off" if any(off) else ""


def measure_step_0(reference: Measurement, measurement: Measurement, loss_type: str, beta: float) -> float:
    """How far the loss of step 0 is from ln 2 with this reference: the mean over pairs of |margin| / 2."""
    scale = loss_scale(pad_sequence([mask.long() for mask in reference.response], batch_first=True), loss_type)
    log_ratios = torch.stack([(a - b).sum() for a, b in zip(measurement.logps, reference.logps, strict=True)])
    chosen, rejected = (beta * log_ratios / scale).chunk(2)
    return (chosen - rejected).abs().mean().item() / 2


# ---- the command


def run_parity(argv: list[str], names: list[str], pairs: int = 4, steps: int = 1, gradients: bool = True) -> dict:
    """Computes the reference, its rounding, and the variants; returns plain types."""
    variants = [parse_variant(name) for name in names]
    eager, bf16 = parse_variant("eager"), parse_variant("bf16")
    with tempfile.TemporaryDirectory() as folder:  # the trainer wants an output_dir; nothing is kept in it
        batch = load_batch(argv, pairs, folder)
        config = parse_config(batch.argv, world_size=1)
        train = config.train
        reference = measure_variant(batch, eager, steps, gradients)
        base = {"float32": reference}  # of each precision: the reference path in it
        nudged = measure_variant(batch, replace(eager, nudged=True), steps, gradients)
        levels = {"float32": measure_rounding(reference, nudged)}
        if any(variant.dtype == "bfloat16" and not find_obstacle(variant) for variant in variants):
            base["bfloat16"] = measure_variant(batch, bf16, steps, gradients)
            levels["bfloat16"] = measure_rounding(reference, base["bfloat16"])
        rows: list[dict[str, Any]] = []
        for variant in variants:
            if obstacle := find_obstacle(variant):
                rows.append({"variant": variant.name, "verdict": "skipped", "why": obstacle})
                continue
            measurement = base["bfloat16"] if variant == bf16 else measure_variant(batch, variant, steps, gradients)
            row = judge_variant(reference, measurement, levels) | {"variant": variant.name}
            if "logps" in row:
                row["step_0"] = measure_step_0(base[variant.dtype], measurement, train.loss_type[0], train.beta)
            rows.append(row)
    return {
        "model": config.model.model_name_or_path,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not train.use_cpu else "cpu",
        "pairs": pairs,
        "tokens": [len(mask) + 1 for mask in batch.response],
        "response_tokens": int(sum(mask.sum() for mask in batch.response)),
        "steps": steps if gradients else 0,
        "learning_rate": train.learning_rate,
        "reference": judge_variant(reference, reference, levels),
        "levels": levels,
        "variants": rows,
    }


def format_parity(result: dict[str, Any]) -> str:
    """What was computed, the rounding that was measured, and the variants."""
    tokens, steps, reference = result["tokens"], result["steps"], result["reference"]
    lines = [
        f"{result['model']} on {result['device']}: {result['pairs']} pairs, sequences of {min(tokens)} to "
        f"{max(tokens)} tokens, {result['response_tokens']:,} response tokens",
        f"reference: eager, fp32, padded, one forward: {reference['verdict']}"
        + (f": {reference['why']}" if reference["verdict"] == "bug" else ""),
    ]
    for dtype, level in result["levels"].items():
        gradient = f", gradient {level['gradient']:.1e} of its norm" if "gradient" in level else ""
        lines.append(
            f"rounding of {dtype}: log-probs max {level['max']:.1e}, mean {level['mean']:.1e} nats a token{gradient}"
        )
    after = f"after {steps} step{'s' * (steps != 1)}"
    headings = ["variant", "logp max", "logp mean", "grad norm", "cosine", after, "step 0", "x rounding", "verdict"]
    table = []
    for row in result["variants"]:
        logps, gradient, later = row.get("logps", {}), row.get("gradient", {}), row.get("after", {})
        columns = [
            (logps.get("max"), ".1e"),
            (logps.get("mean"), ".1e"),
            (gradient.get("norm"), ".5g"),
            (gradient.get("cosine"), ".6f"),
            (later.get("max"), ".1e"),
            (row.get("step_0"), ".1e"),
            (row.get("times_rounding"), ",.1f"),
        ]
        why = f": {row['why']}" if row["verdict"] in ("bug", "skipped") else ""
        cells = ["-" if value is None else format(value, form) for value, form in columns]
        table.append([row["variant"], *cells, row["verdict"] + why])
    lines += ["", format_table(table, headings, "lrrrrrrrl", indent=0), ""]
    lines.append(
        "logp: nats a token against the reference; cosine: of the gradient in the layer farthest off; step 0: how far "
        "the loss is from ln 2 with a\nreference cache made by eager in the same precision; a bug: over "
        f"{MAX_TIMES_ROUNDING:g} times rounding, or a token that should not count; --json: gradients by layer"
    )
    return "\n".join(lines)
