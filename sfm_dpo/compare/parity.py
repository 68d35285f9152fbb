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

from sfm_dpo.common.errors import UserError, nearest
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import parse_config
from sfm_dpo.config_checks import main_loss
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.health.preflight import check_vocabulary
from sfm_dpo.model.loading import load_model_config, model_init_kwargs
from sfm_dpo.train.metrics import loss_scale
from sfm_dpo.train.trainer import SFMDPOTrainer

MAX_TIMES_ROUNDING = 8.0
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}

# ---- variants

WORDS: dict[str, dict[str, Any]] = {  # of a variant's name, joined by +: the fields that each sets
    "eager": {"attention": "eager"},
    "sdpa": {"attention": "sdpa"},
    "padded": {"attention": "sdpa"},
    "packed": {"attention": "packed"},
    "shared": {"attention": "packed", "shared": True},
    "flash": {"attention": "flash_attention_2"},
    "separate": {"separate": True},
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "compile": {"compiled": True},
}
DEFAULT_VARIANTS = "padded packed shared separate batch_1 compile bf16 packed+bf16 flash+bf16".split()


@dataclass(frozen=True)
class Variant:
    """A way to compute a batch. `batch`: pairs in one forward, None for all; `dtype` bfloat16 is autocast; `shared`:
    with prefix sharing.

    `nudged`, which has no word: every weight is moved by its last bit, to measure rounding.
    """

    name: str = field(compare=False)
    attention: str = "eager"
    separate: bool = False
    shared: bool = False
    batch: int | None = None
    dtype: str = "float32"
    compiled: bool = False
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
    if variant.attention != "flash_attention_2":
        return None
    if variant.dtype == "float32":
        return "flash-attn computes in 16 bit only; ask for flash+bf16"
    if not torch.cuda.is_available():
        return "no GPU is visible"
    return None if is_flash_attn_2_available() else "flash-attn is not installed"


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
    """What a variant computed: the loss, its gradients by parameter, and per-token log-probs, all on CPU.

    `logps`: float64, shaped as Batch.response, 0 where a token does not count.
    """

    variant: Variant
    response: list[torch.Tensor]  # Batch's
    logps: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def load_batch(argv: list[str], pairs: int, output_dir: str) -> Batch:
    """`pairs` of the recipe's training pairs, drawn with its seed.

    Raises:
        UserError: the data set is smaller.
    """
    fields = "--report_to none --eval_fraction 0 --eval_strategy no --guard_generations 0 --bf16 false --fp16 false "
    fields += "--dtype float32 --use_peft false --torch_compile false --padding_free false --prefix_sharing false "
    fields += f"--global_batch_size {pairs} --per_device_train_batch_size {pairs} "
    fields += "--precompute_ref_log_probs true"  # no second model
    argv = [*argv, "--output_dir", output_dir, *fields.split()]
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
        args.prefix_sharing = None if variant.shared else False  # None: where the model can
        args.torch_compile_backend = (args.torch_compile_backend or "inductor") if variant.compiled else None
        if variant.attention != "packed":  # TRL would load it by that name, before it is registered
            config.model.attn_implementation = variant.attention
        args.model_init_kwargs = model_init_kwargs(config)
        model = config.model.model_name_or_path
        super().__init__(model=model, args=args, train_dataset=batch.rows, processing_class=batch.tokenizer)
        self.step_0_checked = True  # the check would stop at what is to be measured
        self.variant, self.response = variant, batch.response
        # fp32 weights and bf16 arithmetic, as the Trainer's `bf16: true`
        device, bf16 = self.accelerator.device, variant.dtype == "bfloat16"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        self.model.to(device).train()
        if variant.nudged:
            nudge_weights(self.model)

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

    def measure(self, gradients: bool) -> Measurement:
        """Log-probs, and with `gradients` also the mean loss over all pairs, with the policy as reference."""
        chosen, rejected, total = [], [], 0.0
        for inputs in self.micro_batches():
            with self.autocast:
                reference = self.compute_ref_log_probs(self.forward, inputs)
            lengths = inputs["attention_mask"].sum(dim=1).tolist()
            rows = [row[: n - 1].double().cpu() for row, n in zip(self.log_probs, lengths, strict=True)]
            chosen += rows[: len(rows) // 2]
            rejected += rows[len(rows) // 2 :]
            if gradients:
                inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference, strict=True))
                with self.autocast:
                    loss = self.compute_loss(self.forward, inputs) * (len(reference[0]) / len(self.train_dataset))
                loss.backward()
                total += loss.item()
        grads = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        return Measurement(self.variant, self.response, chosen + rejected, total, grads)


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


# ---- judging

JUDGED = ("logp_max", "logp_mean", "gradient")  # figures that are compared with rounding


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
        rows[layer] = {
            "norm": b.norm().item(),
            "expected_norm": a.norm().item(),
            "cosine": F.cosine_similarity(a, b, dim=0, eps=1e-30).item(),
            "relative": ((a - b).norm() / a.norm().clamp(min=1e-30)).item(),
        }
    return rows


def compare_measurements(reference: Measurement, other: Measurement) -> dict[str, Any]:
    """Differences in nats a token, over the tokens that count in either; and of the gradients, if measured."""
    a, b = torch.cat(reference.logps), torch.cat(other.logps)
    gap, count = (a - b).abs(), ((a != 0) | (b != 0)).sum().clamp(min=1)
    figures: dict[str, Any] = {"logp_max": gap.max().item(), "logp_mean": (gap.sum() / count).item()}
    if other.gradients:
        layers = compare_gradients(reference.gradients, other.gradients)
        worst = max(layers, key=lambda name: layers[name]["relative"])
        figures |= {"gradient": layers[worst]["relative"], "worst": worst, "layers": layers}
        figures["gradient_norm"] = math.hypot(*(layer["norm"] for layer in layers.values()))
        figures["cosine"] = min(layer["cosine"] for layer in layers.values())
    return figures


def measure_rounding(reference: Measurement, rounded: Measurement) -> dict[str, float]:
    """How far rounding takes the reference path from itself, for each of JUDGED; never below one roundoff."""
    figures, size = compare_measurements(reference, rounded), torch.cat(reference.logps).abs()
    largest = {"logp_max": size.max().item(), "logp_mean": size.mean().item(), "gradient": 1.0}
    unit = ROUNDOFF[rounded.variant.dtype]
    return {name: max(figures[name], unit * largest[name]) for name in JUDGED if name in figures}


def judge_variant(reference: Measurement, measurement: Measurement, levels: dict[str, dict]) -> dict[str, Any]:
    """Figures and verdict; `levels` by dtype, from measure_rounding."""
    variant, level = measurement.variant, levels[measurement.variant.dtype]
    row: dict[str, Any] = {"variant": variant.name, "dtype": variant.dtype, "loss": measurement.loss, "verdict": "bug"}
    if [len(logps) for logps in measurement.logps] != [len(mask) for mask in measurement.response]:
        return row | {"why": "sequences have other lengths than their token ids"}
    tensors = (*measurement.logps, *measurement.gradients.values())
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        return row | {"why": "a log-prob or a gradient is not finite"}
    row |= compare_measurements(reference, measurement)
    times, name = max((row[name] / level[name], name) for name in level)
    row["times_rounding"] = times
    if why := find_wrong_tokens(measurement):
        return row | {"why": why}
    label = f"gradient of {row['worst']}" if name == "gradient" else name.replace("_", " ")
    if times > MAX_TIMES_ROUNDING:
        return row | {"why": f"{label}: {times:,.0f} times rounding{locate_difference(reference, measurement, level)}"}
    verdict = "rounding" if times else "equal"
    return row | {"verdict": verdict, "why": f"at most {times:.1f} times rounding ({label})"}


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
    gaps = [(a - b).abs() for a, b in zip(reference.logps, measurement.logps, strict=True)]
    means = [gap.sum() / mask.sum() for gap, mask in zip(gaps, measurement.response, strict=True)]
    off = [mean.item() > MAX_TIMES_ROUNDING / 2 * level["logp_mean"] for mean in means]
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


def run_parity(argv: list[str], names: list[str], pairs: int = 4, gradients: bool = True) -> dict:
    """Computes the reference, its rounding, and the variants; returns plain types."""
    variants = [parse_variant(name) for name in names]
    eager, bf16 = parse_variant("eager"), parse_variant("bf16")
    with tempfile.TemporaryDirectory() as folder:  # the trainer wants an output_dir; nothing is kept in it
        batch = load_batch(argv, pairs, folder)
        config = parse_config(batch.argv, world_size=1)
        train = config.train
        reference = ParityTrainer(batch, eager).measure(gradients)
        base = {"float32": reference}  # of each precision: the reference path in it
        nudged = ParityTrainer(batch, replace(eager, nudged=True)).measure(gradients)
        levels = {"float32": measure_rounding(reference, nudged)}
        if any(variant.dtype == "bfloat16" and not find_obstacle(variant) for variant in variants):
            base["bfloat16"] = ParityTrainer(batch, bf16).measure(gradients)
            levels["bfloat16"] = measure_rounding(reference, base["bfloat16"])
        rows: list[dict[str, Any]] = []
        for variant in variants:
            if obstacle := find_obstacle(variant):
                rows.append({"variant": variant.name, "verdict": "skipped", "why": obstacle})
                continue
            measurement = base["bfloat16"] if variant == bf16 else ParityTrainer(batch, variant).measure(gradients)
            row = judge_variant(reference, measurement, levels)
            if "times_rounding" in row:
                loss = main_loss(train.loss_type)
                row["step_0"] = measure_step_0(base[variant.dtype], measurement, loss, train.beta)
            rows.append(row)
    return {
        "model": config.model.model_name_or_path,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not train.use_cpu else "cpu",
        "pairs": pairs,
        "tokens": [len(mask) + 1 for mask in batch.response],
        "response_tokens": int(sum(mask.sum() for mask in batch.response)),
        "reference": judge_variant(reference, reference, levels),
        "levels": levels,
        "variants": rows,
    }


def format_parity(result: dict[str, Any]) -> str:
    """What was computed, the rounding that was measured, and the variants."""
    tokens, reference = result["tokens"], result["reference"]
    lines = [
        f"{result['model']} on {result['device']}: {result['pairs']} pairs, sequences of {min(tokens)} to "
        f"{max(tokens)} tokens, {result['response_tokens']:,} response tokens",
        f"reference: eager, fp32, padded, one forward: {reference['verdict']}"
        + (f": {reference['why']}" if reference["verdict"] == "bug" else ""),
    ]
    for dtype, level in result["levels"].items():
        lines.append(
            f"rounding of {dtype}: " + ", ".join(f"{name.replace('_', ' ')} {x:.1e}" for name, x in level.items())
        )
    columns = {
        "logp max": ("logp_max", ".1e"),
        "logp mean": ("logp_mean", ".1e"),
        "grad norm": ("gradient_norm", ".5g"),
        "cosine": ("cosine", ".6f"),
        "step 0": ("step_0", ".1e"),
        "x rounding": ("times_rounding", ",.1f"),
    }
    table = []
    for row in result["variants"]:
        cells = [format(row[name], form) if name in row else "-" for name, form in columns.values()]
        why = f": {row['why']}" if row["verdict"] in ("bug", "skipped") else ""
        table.append([row["variant"], *cells, row["verdict"] + why])
    lines += ["", format_table(table, ["variant", *columns, "verdict"], "lrrrrrrl", indent=0), ""]
    return "\n".join([*lines, "docs/reproducibility.md explains the columns and the rule; --json: gradients by layer"])
