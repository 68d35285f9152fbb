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
from datasets import Dataset

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import parse_config
from sfm_dpo.config_checks import nearest
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.health.preflight import check_vocabulary
from sfm_dpo.model.loading import load_model_config, model_init_kwargs
from sfm_dpo.train.trainer import SFMDPOTrainer

MAX_TIMES_ROUNDING = 8.0
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
DEFAULT_VARIANTS = "padded packed shared batch_1 compile bf16 packed+bf16".split()
WORDS: dict[str, dict[str, Any]] = {  # of a variant's name, joined by +: the fields that each sets
    "eager": {"attention": "eager"},
    "padded": {"attention": "sdpa"},
    "packed": {"attention": "packed"},
    "shared": {"attention": "packed", "shared": True},
    "bf16": {"dtype": "bfloat16"},
    "compile": {"compiled": True},
}


@dataclass(frozen=True)
class Variant:
    """A way to compute a batch.

    `shared`: with prefix sharing. `batch`: pairs in one forward, None for all. `dtype` bfloat16 is autocast.
    `nudged`, which has no word: every weight is moved by its last bit, to measure rounding.
    """

    name: str = field(compare=False)
    attention: str = "eager"
    shared: bool = False
    batch: int | None = None
    dtype: str = "float32"
    compiled: bool = False
    nudged: bool = False


def parse_variant(name: str) -> Variant:
    """The variant of a name such as `packed+bf16`. Raises UserError for an unknown word."""
    variant = Variant(name)
    for word in name.split("+"):
        if batch := re.fullmatch(r"batch_([1-9]\d*)", word):
            variant = replace(variant, batch=int(batch[1]))
        elif word in WORDS:
            variant = replace(variant, **WORDS[word])
        else:
            raise UserError(
                f"--variants {name}: unknown word {word!r}{nearest(word, set(WORDS))}; the words are "
                f"{', '.join(WORDS)}, batch_N, joined by +"
            )
    return variant


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
    """What a variant computed: per-token log-probs and the gradients of the loss by parameter, all on CPU.

    `logps`: float64, shaped as Batch.response, 0 where a token does not count.
    """

    variant: Variant
    logps: list[torch.Tensor]
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
    tokens = load_token_pairs(config, tokenizer).train
    check_vocabulary(tokens, tokenizer, load_model_config(config).get_text_config().vocab_size)
    if len(tokens) < pairs:
        raise UserError(f"--pairs {pairs}: the dataset has {len(tokens)}")
    drawn = np.random.default_rng(config.train.seed).permutation(len(tokens))[:pairs]
    rows = tokens.select(np.sort(drawn))
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
        args.padding_free = variant.attention == "packed"
        args.prefix_sharing = None if variant.shared else False  # None: where the model can
        args.torch_compile = variant.compiled
        args.torch_compile_backend = (args.torch_compile_backend or "inductor") if variant.compiled else None
        if variant.attention != "packed":  # TRL would load it by that name, before it is registered
            config.model.attn_implementation = variant.attention
        args.model_init_kwargs = model_init_kwargs(config)
        model = config.model.model_name_or_path
        super().__init__(model=model, args=args, train_dataset=batch.rows, processing_class=batch.tokenizer)
        self.step_0_checked = True  # the check would stop at what is to be measured
        self.variant = variant
        # fp32 weights and bf16 arithmetic, as the Trainer's `bf16: true`
        device = self.accelerator.device
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=variant.dtype == "bfloat16")
        self.model.to(device).train()
        if variant.nudged:
            nudge_weights(self.model)

    def micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """The rows as the trainer's collator puts them together, `variant.batch` pairs at a time."""
        rows = list(self.train_dataset)
        size = self.variant.batch or len(rows)
        for start in range(0, len(rows), size):
            yield self._prepare_inputs(self.data_collator(rows[start : start + size]))

    def forward(self, **inputs: Any):
        """The variant's forward, as TRL calls the model; keeps the log-probs, [2B, L - 1]."""
        output = self.model(**inputs)
        self.log_probs = output.log_probs.detach()
        return output

    def measure(self) -> Measurement:
        """Log-probs, and the gradients of the mean loss over all pairs, with the policy as reference."""
        chosen: list[torch.Tensor] = []
        rejected: list[torch.Tensor] = []
        for inputs in self.micro_batches():
            with self.autocast:
                reference = self.compute_ref_log_probs(self.forward, inputs)
            lengths = inputs["attention_mask"].sum(dim=1).tolist()
            rows = [row[: n - 1].double().cpu() for row, n in zip(self.log_probs, lengths, strict=True)]
            chosen += rows[: len(rows) // 2]
            rejected += rows[len(rows) // 2 :]
            inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference
            share = len(reference[0]) / len(self.train_dataset)
            with self.autocast:
                loss = self.compute_loss(self.forward, inputs) * share
            loss.backward()
        gradients = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        return Measurement(self.variant, chosen + rejected, gradients)


@torch.no_grad()
def nudge_weights(model) -> None:
    """Moves each weight to a neighbouring floating-point number, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.bool).to(weight.device)
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype)))


# ---- judging


def compare_gradients(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> dict[str, float]:
    """|actual - expected| / |expected| by layer.

    A layer is `layer 3` for model.layers.3.mlp.up_proj.weight; outside the layers it has its module's name.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    for name in expected:
        number = re.search(r"\.(\d+)\.", name)
        layers[f"layer {number[1]}" if number else name.split(".")[-2]].append(name)
    relative = {}
    for layer, names in layers.items():
        a = torch.cat([expected[name].flatten() for name in names]).double()
        b = torch.cat([actual.get(name, torch.zeros_like(expected[name])).flatten() for name in names]).double()
        relative[layer] = ((a - b).norm() / a.norm().clamp(min=1e-30)).item()
    return relative


def compare_measurements(reference: Measurement, other: Measurement) -> dict[str, Any]:
    """`logp_max` and `logp_mean` of the differences, in nats a token; `gradient`: of the `worst` of the `layers`."""
    a = torch.cat(reference.logps)
    b = torch.cat(other.logps)
    gap = (a - b).abs()
    count = ((a != 0) | (b != 0)).sum().clamp(min=1)
    layers = compare_gradients(reference.gradients, other.gradients)
    worst = max(layers, key=lambda layer: layers[layer])
    return {
        "logp_max": gap.max().item(),
        "logp_mean": (gap.sum() / count).item(),
        "gradient": layers[worst],
        "worst": worst,
        "layers": layers,
    }


def measure_rounding(reference: Measurement, rounded: Measurement) -> dict[str, float]:
    """How far rounding takes the reference path from itself, for each metric; never below one roundoff."""
    differences = compare_measurements(reference, rounded)
    size = torch.cat(reference.logps).abs()
    largest = {"logp_max": size.max().item(), "logp_mean": size.mean().item(), "gradient": 1.0}
    unit = ROUNDOFF[rounded.variant.dtype]
    return {name: max(differences[name], unit * largest[name]) for name in largest}


def judge_variant(
    reference: Measurement, other: Measurement, level: dict[str, float], response: list[torch.Tensor]
) -> dict[str, Any]:
    """Differences and verdict: rounding, or bug and why.

    Args:
        level: of rounding in the variant's precision, from measure_rounding.
        response: Batch's.
    """
    row: dict[str, Any] = {"variant": other.variant.name, "verdict": "bug"}
    if not all(torch.isfinite(tensor).all() for tensor in (*other.logps, *other.gradients.values())):
        return row | {"why": "a log-prob or a gradient is not finite"}
    row |= compare_measurements(reference, other)
    times = {name: row[name] / level[name] for name in level}
    metric = max(times, key=lambda name: times[name])
    row["times_rounding"] = times[metric]
    if why := find_wrong_tokens(other.logps, response):
        return row | {"why": why}
    if times[metric] > MAX_TIMES_ROUNDING:
        label = f"gradient of {row['worst']}" if metric == "gradient" else metric.replace("_", " ")
        return row | {"why": f"{label}: {times[metric]:,.0f} times rounding"}
    return row | {"verdict": "rounding"}


def find_wrong_tokens(logps: list[torch.Tensor], response: list[torch.Tensor]) -> str | None:
    """What is wrong with the tokens that count. A log-prob of exactly 0 does not count, or is of a certain token."""
    counts = torch.cat(logps) != 0
    should = torch.cat(response)
    extra = int((counts & ~should).sum())
    missing = int((~counts & should).sum())
    # A model may be certain of single tokens; of the same token of most responses it is not
    if not extra and missing * 2 < len(response):
        return None
    return f"the mask is off: {extra} tokens outside the response count, {missing} of it do not count"


# ---- the command


def run_parity(argv: list[str], names: list[str], pairs: int = 4) -> dict[str, Any]:
    """Computes the reference, its rounding, and the variants; returns plain types."""
    eager = Variant("eager")
    variants = [eager, *(parse_variant(name) for name in names)]
    with tempfile.TemporaryDirectory() as folder:  # the trainer wants an output_dir; nothing is kept in it
        batch = load_batch(argv, pairs, folder)
        reference = ParityTrainer(batch, eager).measure()
        nudged = ParityTrainer(batch, replace(eager, nudged=True)).measure()
        levels = {"float32": measure_rounding(reference, nudged)}
        if any(variant.dtype == "bfloat16" for variant in variants):
            bf16 = ParityTrainer(batch, replace(eager, dtype="bfloat16")).measure()
            levels["bfloat16"] = measure_rounding(reference, bf16)
        rows = []
        for variant in variants:
            measurement = reference if variant == eager else ParityTrainer(batch, variant).measure()
            rows.append(judge_variant(reference, measurement, levels[variant.dtype], batch.response))
    return {"tokens": [len(mask) + 1 for mask in batch.response], "levels": levels, "variants": rows}


def format_parity(result: dict[str, Any]) -> str:
    """What was computed, the rounding that was measured, and the variants."""
    tokens = result["tokens"]
    lines = [f"{len(tokens) // 2} pairs, sequences of {min(tokens)} to {max(tokens)} tokens"]
    for dtype, level in result["levels"].items():
        parts = [f"{name.replace('_', ' ')} {size:.1e}" for name, size in level.items()]
        lines.append(f"rounding of {dtype}: {', '.join(parts)}")
    columns = {"logp_max": ".1e", "logp_mean": ".1e", "gradient": ".1e", "times_rounding": ",.1f"}
    table = []
    for row in result["variants"]:
        cells = [format(row[name], form) if name in row else "-" for name, form in columns.items()]
        table.append([row["variant"], *cells, ": ".join(filter(None, [row["verdict"], row.get("why")]))])
    headings = ["variant", "logp max", "logp mean", "gradient", "x rounding", "verdict"]
    lines += ["", format_table(table, headings, "lrrrrl", indent=0), ""]
    return "\n".join([*lines, "docs/reproducibility.md explains the columns and the rule; --json: gradients by layer"])
