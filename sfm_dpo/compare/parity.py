"""Parity of code paths: runs the same batch and weights through several forwards of the actual trainer.

The reference is eager attention in fp32, padded, with all pairs in one forward. docs/reproducibility.md has the rule.
"""

import gc
import logging
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import format_table
from sfm_dpo.config import parse_config
from sfm_dpo.config_short_run import UNCOMPILED, short_run
from sfm_dpo.data.tokenization import check_vocabulary, load_token_pairs, load_tokenizer
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.train.trainer import SFMDPOTrainer

log = logging.getLogger(__name__)

MAX_TIMES_ROUNDING = 8.0
DEFAULT_VARIANTS = "padded packed shared batch_1 compile bf16 packed+bf16".split()
# The words of a variant's name, joined by +, and the fields that each sets; None keeps the recipe's value
WORDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "padded": {"attn_implementation": "sdpa"},
    "packed": {"padding_free": True, "attn_implementation": None},
    "shared": {"padding_free": True, "attn_implementation": None, "prefix_sharing": ""},  # if the model supports it
    "bf16": {},  # autocast
    "batch_1": {},  # one pair in a forward
    "compile": dict.fromkeys(UNCOMPILED) | {"torch_compile": True},
}


def select_path(variant: str) -> dict[str, Any]:
    """The fields of the configuration that select the path of a variant. Raises UserError for an unknown word."""
    fields = UNCOMPILED | {"padding_free": False, "attn_implementation": "eager", "prefix_sharing": False}
    for word in variant.split("+"):
        if word not in WORDS:
            raise UserError(f"--variants {variant}: unknown word {word!r}; use {', '.join(WORDS)}, joined by +")
        fields |= WORDS[word]
    return fields


def dtype_of(variant: str) -> str:
    return "bfloat16" if "bf16" in variant.split("+") else "float32"


@dataclass
class Measurement:
    """The results of a variant, on CPU."""

    variant: str
    logps: torch.Tensor  # float64 [all tokens of chosen, then of rejected]; 0 for tokens without loss
    gradients: dict[str, torch.Tensor]  # gradients of the loss, by parameter


def load_rows(argv: list[str], pairs: int) -> tuple[Dataset, PreTrainedTokenizerBase]:
    """A sample of `pairs` training pairs of the recipe, drawn with its seed, and the tokenizer."""
    config = parse_config(argv, world_size=1)
    tokenizer = load_tokenizer(config)
    tokens = load_token_pairs(config, tokenizer).train
    check_vocabulary(tokens, tokenizer, load_model_config(config).get_text_config().vocab_size)
    if len(tokens) < pairs:
        raise UserError(f"--pairs {pairs}: the dataset has only {len(tokens)}; choose fewer")
    drawn = np.random.default_rng(config.train.seed).permutation(len(tokens))[:pairs]
    return tokens.select(np.sort(drawn)), tokenizer


class ParityTrainer(SFMDPOTrainer):
    """The trainer of a variant, with a freshly loaded model and no cache of reference log-probs."""

    def __init__(self, argv: list[str], rows: Dataset, tokenizer: PreTrainedTokenizerBase, variant: str, nudged: bool):
        gc.collect()  # frees the last variant's model (trainers have reference cycles): two may not fit on a GPU
        torch.cuda.empty_cache()
        config = parse_config(short_run(argv, **select_path(variant)), world_size=1)
        super().__init__(config, train_dataset=rows, processing_class=tokenizer)
        self.step_0_checked = True  # the check would stop at the differences to be measured
        self.variant = variant
        # fp32 weights and bf16 arithmetic, as with the Trainer's `bf16: true`
        device = self.accelerator.device
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype_of(variant) == "bfloat16")
        self.model.to(device).train()
        if nudged:  # to measure rounding
            nudge_weights(self.model)

    def forward(self, **inputs: Any):
        """The variant's forward, as TRL calls the model; stores the log-probs, [2B, L - 1]."""
        output = self.model(**inputs)
        self.log_probs = output.log_probs.detach()
        return output

    def measure(self) -> Measurement:
        """Log-probs and gradients of the mean loss over all pairs, with the policy as the reference."""
        chosen: list[torch.Tensor] = []
        rejected: list[torch.Tensor] = []
        pairs = list(self.train_dataset)
        size = 1 if "batch_1" in self.variant.split("+") else len(pairs)
        for start in range(0, len(pairs), size):
            inputs = self._prepare_inputs(self.data_collator(pairs[start : start + size]))
            with self.autocast:
                reference = self.compute_ref_log_probs(self.forward, inputs)
            lengths = inputs["attention_mask"].sum(dim=1).tolist()
            rows = [row[: n - 1].double().cpu() for row, n in zip(self.log_probs, lengths, strict=True)]
            chosen += rows[: len(rows) // 2]
            rejected += rows[len(rows) // 2 :]
            inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference
            share = len(reference[0]) / len(pairs)
            with self.autocast:
                loss = self.compute_loss(self.forward, inputs) * share
            loss.backward()
        gradients = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        return Measurement(self.variant, torch.cat(chosen + rejected), gradients)


@torch.no_grad()
def nudge_weights(model) -> None:
    """Moves each weight to a neighbouring floating-point number, up or down at random."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.bool).to(weight.device)
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype)))


def compare_gradients(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> dict[str, float]:
    """|actual - expected| / |expected| for each layer, and for each module outside the layers."""
    errors: dict[str, float] = defaultdict(float)
    sizes: dict[str, float] = defaultdict(float)
    for name, gradient in expected.items():
        number = re.search(r"\.(\d+)\.", name)
        layer = f"layer {number[1]}" if number else name.split(".")[-2]
        error = actual.get(name, torch.zeros_like(gradient)).double() - gradient.double()
        errors[layer] += error.square().sum().item()
        sizes[layer] += gradient.double().square().sum().item()
    return {layer: (errors[layer] / max(sizes[layer], 1e-60)) ** 0.5 for layer in errors}


def compare_measurements(reference: Measurement, other: Measurement) -> dict[str, Any]:
    """`logp_max` and `logp_mean` of the differences, in nats per token; `gradient`: the worst of the `layers`."""
    gap = (reference.logps - other.logps).abs()
    count = ((reference.logps != 0) | (other.logps != 0)).sum().clamp(min=1)
    layers = compare_gradients(reference.gradients, other.gradients)
    return {
        "logp_max": gap.max().item(),
        "logp_mean": (gap.sum() / count).item(),
        "gradient": float(np.max(list(layers.values()))),  # NaN takes precedence
        "layers": layers,
    }


def measure_rounding(reference: Measurement, rounded: Measurement) -> dict[str, float]:
    """How much rounding changes each metric of the reference path; at least one unit of roundoff."""
    differences = compare_measurements(reference, rounded)
    size = reference.logps.abs()
    sizes = {"logp_max": size.max().item(), "logp_mean": size.mean().item(), "gradient": 1.0}
    unit = 2.0**-8 if dtype_of(rounded.variant) == "bfloat16" else 2.0**-24
    return {name: max(differences[name], unit * sizes[name]) for name in sizes}


def judge_variant(reference: Measurement, other: Measurement, level: dict[str, float]) -> dict[str, Any]:
    """Differences and verdict (rounding or bug), given the `level` of rounding in the variant's precision."""
    row: dict[str, Any] = {"variant": other.variant} | compare_measurements(reference, other)
    times = [row[name] / level[name] for name in level]
    row["times_rounding"] = max(times)
    row["verdict"] = "rounding" if all(ratio <= MAX_TIMES_ROUNDING for ratio in times) else "bug"  # NaN is a bug
    return row


def run_parity(argv: list[str], names: list[str], pairs: int = 4) -> dict[str, Any]:
    """The rounding `levels` and the differences of each variant on `pairs` pairs of the recipe in `argv`."""
    fields: dict[str, Any] = {"bf16": False, "fp16": False, "dtype": "float32", "use_peft": False}
    fields |= {"global_batch_size": pairs, "per_device_train_batch_size": pairs, "fit_memory": False}
    fields |= {"precompute_ref_log_probs": True, "ref_model_name_or_path": ""}  # no second model
    for name in names:
        select_path(name)
    with tempfile.TemporaryDirectory() as folder:  # the trainer needs an output_dir; nothing in it is kept
        argv = short_run(argv, output_dir=folder, **fields)
        rows, tokenizer = load_rows(argv, pairs)

        def measure(variant: str, nudged: bool = False) -> Measurement:
            log.info(f"computing {variant}{', weights moved by a bit' if nudged else ''}")
            return ParityTrainer(argv, rows, tokenizer, variant, nudged).measure()

        reference = measure("eager")
        levels = {"float32": measure_rounding(reference, measure("eager", nudged=True))}
        if any(dtype_of(name) == "bfloat16" for name in names):
            levels["bfloat16"] = measure_rounding(reference, measure("eager+bf16"))
        judged = [judge_variant(reference, reference, levels["float32"])]
        for name in names:
            judged.append(judge_variant(reference, measure(name), levels[dtype_of(name)]))
    return {"pairs": pairs, "levels": levels, "variants": judged}


def format_parity(result: dict[str, Any]) -> str:
    lines = []
    for dtype, level in result["levels"].items():
        lines.append(f"rounding of {dtype}: " + ", ".join(f"{name} {size:.1e}" for name, size in level.items()))
    table = []
    for row in result["variants"]:
        differences = [f"{row[name]:.1e}" for name in ("logp_max", "logp_mean", "gradient")]
        table.append([row["variant"], *differences, f"{row['times_rounding']:,.1f}", row["verdict"]])
    headings = ["variant", "logp_max", "logp_mean", "gradient", "x rounding", "verdict"]
    return "\n".join([*lines, "", format_table(table, headings, "lrrrrl", indent=0)])
