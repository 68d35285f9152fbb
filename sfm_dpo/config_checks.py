"""Checks of a configuration before any model or data is loaded: ranges, combinations, what is installed."""

import argparse
import importlib.util
import inspect
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import get_scheduler
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from sfm_dpo.common.errors import UserError, nearest

LOSS_TYPES = (
    "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down "
    "discopop sft"
).split()
# Losses whose log-ratios are means over response tokens; the others in TRL use sums.
LENGTH_NORMALIZED_LOSSES = {"sigmoid_norm", "ipo"}

HELD_OUT = "eval"  # the pairs of eval_fraction, beside the names of eval_datasets
EVAL_METRICS = """loss rewards/chosen rewards/rejected rewards/margins rewards/average rewards/accuracies logps/chosen
    logps/rejected logps/accuracies logits/chosen logits/rejected entropy mean_token_accuracy""".split()

# (what holds for a good value, in words, fields); a field without a value is not checked
_RANGES = [
    (
        lambda v: v >= 1,
        "at least 1",
        "max_prompt_length max_samples preflight_samples global_batch_size per_device_train_batch_size "
        "per_device_eval_batch_size dataset_num_proc max_pairs_per_prompt min_response_tokens max_response_tokens "
        "max_length_ratio lora_r precompute_ref_batch_size ddp_timeout",
    ),
    (lambda v: v >= 2, "at least 2", "max_length"),
    (lambda v: v >= 2, "at least 2: with 1, a kill while saving can leave no complete checkpoint", "save_total_limit"),
    (lambda v: v > 0, "above 0", "beta learning_rate memory_gib num_train_epochs"),
    (lambda v: v > 0, "above 0 (below 1: a share of all steps)", "save_steps logging_steps eval_steps"),
    (
        lambda v: v >= 0,
        "at least 0",
        "weight_decay adam_epsilon max_grad_norm data_seed dataloader_num_workers guard_generations hang_timeout",
    ),
    (lambda v: 0 <= v <= 1, "in 0..1", "max_dropped_fraction adam_beta1 adam_beta2 lora_dropout label_smoothing"),
    (lambda v: 0 <= v < 1, "at least 0 and below 1", "eval_fraction"),
    (lambda v: 0 <= v < 2**32, "at least 0 and below 2**32", "seed"),
]

# Fields of TRL and Transformers that do not work in training, metrics, guard, preflight and resume alike
REFUSED = {
    "auto_find_batch_size": "would change the global batch; remove it",
    "enable_jit_checkpoint": "ranks could save at different steps; remove it, and stop by the file STOP",
    "ignore_data_skip": "a resumed run would train on some pairs twice; remove it",
    "label_smoothing_factor": "is of Trainer's cross-entropy; DPO's robust and exo_pair have label_smoothing",
    "ld_alpha": "its weighted log-probs reach neither the metrics, nor the preflight, nor step 0; remove it",
    "neftune_noise_alpha": "noise in the policy alone, so that step 0 is not ln 2; remove it",
    "save_only_model": "a run could not be resumed without its optimizer; remove it",
    "streaming": "pairs are checked before training, so they cannot be streamed",
    "sync_ref_model": "checkpoints do not hold the synchronised reference, a resumed run would lose it; remove it",
    "test_split_size": "set eval_fraction instead, which is seeded",
}


def main_loss(loss_types: list[str]) -> str:
    """The loss of a mixture on whose scale rewards are logged: the first that compares the two responses."""
    return next((loss for loss in loss_types if loss != "sft"), "sft")


def find_conflicts(c: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Fields whose value is wrong beside the others, each with what to do."""
    if not c.model_name_or_path:
        yield "model_name_or_path", "give a Hub id or a folder"
    if not c.dataset_name and not c.datasets:
        yield "dataset_name", "give a Hub id, a .json/.jsonl/.parquet file or a folder"
    if c.dataset_name and c.datasets:
        yield "dataset_name", "datasets is set as well; keep one of them"
    if c.max_prompt_length and c.max_length and c.max_prompt_length >= c.max_length:
        yield "max_prompt_length", f"must be below max_length {c.max_length}, or no token is left for the response"
    if not c.loss_type:
        yield "loss_type", "is empty; name at least one loss"
    summed = [loss for loss in c.loss_type if loss not in {*LENGTH_NORMALIZED_LOSSES, "sft"}]
    if summed and c.beta >= 1 and not c.allow_unnormalized_beta:
        why = f"with loss_type {summed[0]} this loss uses sums over tokens, some fifty times stiffer than OLMo's means"
        yield "beta", f"{why}; use loss_type sigmoid_norm, or beta 0.1, or allow_unnormalized_beta: true"
    if c.prefix_sharing and not c.padding_free:
        yield "prefix_sharing", "needs padding_free: true"
    if c.fp16 and c.use_cpu:
        yield "fp16", "no GPU is visible; on CPU leave it out"
    sharded = "true" in (os.environ.get("ACCELERATE_USE_DEEPSPEED"), os.environ.get("ACCELERATE_USE_FSDP"))
    if c.dtype in ("bfloat16", "float16") and not sharded and not c.use_peft:
        why = f"without DeepSpeed or FSDP: there are no fp32 master weights; updates of {c.learning_rate:g} round to 0"
        yield "dtype", f"{why}; remove dtype (bf16: true still computes in bf16)"
    if c.fit_memory and c.deepspeed:
        yield "deepspeed", "fit_memory: true needs accelerate launch --config_file"
    steps = c.profile_steps
    if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield "profile_steps", "must be the first and the last step to profile, for instance [10, 12]"
    if c.guard_generations and not c.eval_fraction:
        yield "guard_generations", "needs prompts: set eval_fraction"
    if c.logging_strategy == "no" and c.guard != "skip":
        yield "logging_strategy", "the guard reads the log; remove it, or set guard: skip"
    if c.eval_strategy != "no" and not c.eval_fraction and not c.eval_datasets:
        yield "eval_strategy", "nothing is held out; set eval_fraction, for instance 0.02, or eval_datasets"
    if c.save_strategy == "best":
        yield "save_strategy", "a run could not be resumed; set load_best_model_at_end"
    if c.metric_for_best_model or c.load_best_model_at_end:
        if not c.eval_strategy == c.save_strategy != "no":
            yield (
                "eval_strategy",
                f"the best checkpoint must be an evaluated one; set save_strategy's value, {c.save_strategy}",
            )
        if c.save_strategy == "steps" and (c.eval_steps or c.logging_steps) != c.save_steps:
            yield "eval_steps", f"each evaluated step must be a checkpoint; set it to save_steps, {c.save_steps:g}"


def find_missing(c: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Fields that this machine cannot satisfy, each with what to do."""
    if c.attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
        yield "attn_implementation", "needs flash-attn and a GPU; remove it: padding_free: true needs no such package"
    if c.use_cpu and c.flash_attention != "auto":
        yield "flash_attention", "is a kernel of GPUs; on the CPU remove it"
    if c.load_in_4bit and importlib.util.find_spec("bitsandbytes") is None:
        yield "load_in_4bit", "bitsandbytes is not installed; pip install bitsandbytes, or remove it"
    launched = "LOCAL_RANK" in os.environ or any(name.startswith("ACCELERATE_USE_") for name in os.environ)
    if c.deepspeed and not launched:
        yield "deepspeed", "no launcher started this process; use accelerate launch --config_file ..., which brings it"


def check_fields(namespace: argparse.Namespace, world_size: int) -> None:
    """Ranges and combinations that argparse cannot see, once the precision is resolved.

    Raises:
        UserError: names the field, its value and what to do.
    """
    values = vars(namespace)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} {value}: must be a finite number")
    for is_good, words, names in _RANGES:
        for name in names.split():
            if values[name] is not None and not is_good(values[name]):
                raise UserError(f"{name} {values[name]}: must be {words}")
    for name, remedy in REFUSED.items():
        if values[name]:
            raise UserError(f"{name} {values[name]}: {remedy}")
    for loss in namespace.loss_type:
        check_known("loss_type", loss, LOSS_TYPES)
    for name, remedy in find_conflicts(namespace):
        raise UserError(f"{name} {values[name]}: {remedy}")
    sets = read_eval_sets(namespace.eval_datasets)
    if namespace.metric_for_best_model or namespace.load_best_model_at_end:
        prefixes = [f"eval_{name}_" for name in sets]
        if namespace.eval_fraction:
            prefixes.append("eval_")
        metric = (namespace.metric_for_best_model or "loss").removeprefix("eval_")
        known = [prefix + name for prefix in prefixes for name in EVAL_METRICS]
        check_known("metric_for_best_model", f"eval_{metric}", known)
    check_batch(
        namespace.global_batch_size,
        namespace.per_device_train_batch_size,
        world_size,
        namespace.gradient_accumulation_steps,
    )


def check_known(field: str, name: Any, known: Iterable[str]) -> None:
    """Raises UserError if `name`, a value of `field`, is not among the known ones."""
    if name not in known:
        near = nearest(name, known) or f"; the known ones are {', '.join(sorted(known))}"
        raise UserError(f"{field} {name}: is unknown{near}")


def read_eval_sets(text: str | None) -> dict[str, dict[str, str]]:
    """`eval_datasets`: by name the path of each set, and its configuration `name` and `split` where given.

    Raises:
        UserError: names the set and what is wrong with it.
    """
    remedy = "must be a mapping of names to sets, such as {math: math.jsonl, code: {path: org/set, split: test}}"
    try:
        given = json.loads(text or "{}").items()
    except (ValueError, AttributeError) as error:
        raise UserError(f"eval_datasets {text}: {remedy}") from error
    sets = {}
    for name, entry in given:
        if not re.fullmatch(r"[\w-]+", name) or name in (HELD_OUT, "train"):
            raise UserError(f"eval_datasets {name}: give a name of letters and digits other than {HELD_OUT} and train")
        sets[name] = {"path": entry} if isinstance(entry, str) else entry
        if not isinstance(sets[name], dict) or "path" not in sets[name]:
            raise UserError(f"eval_datasets {text}: {remedy}")
        for key in sets[name]:
            check_known(f"eval_datasets {name}:", key, ("path", "name", "split"))
    return sets


def check_batch(total: int, per_device: int, world_size: int, accumulation: int) -> None:
    """The global batch must be a multiple of what the processes take at once; an error offers what would be."""
    unit = per_device * world_size
    if total % unit:
        lower = total // unit * unit
        totals = [str(n) for n in (lower, lower + unit) if n]
        sizes = [str(n) for n in range(1, total + 1) if total % (n * world_size) == 0]
        offer = f"global_batch_size {' or '.join(totals)}"
        if sizes:
            offer += f"; per_device_train_batch_size {', '.join(sizes[:8])}"
        raise UserError(
            f"global_batch_size {total} is not a multiple of per_device_train_batch_size {per_device} x {world_size} "
            f"process(es); these work: {offer}"
        )
    if accumulation not in (1, total // unit):
        raise UserError(
            f"gradient_accumulation_steps {accumulation}: global_batch_size {total} on {world_size} process(es) makes "
            f"it {total // unit}; remove the field"
        )


def check_machine(namespace: argparse.Namespace) -> None:
    """Whether what is asked for is installed here and known to its library. For commands that compute.

    Raises:
        UserError: names the field, its value and what to do.
    """
    kernel = namespace.attn_implementation
    if kernel and "/" not in kernel:  # with a slash it is a kernel of the Hub
        check_known("attn_implementation", kernel, {"eager", *ALL_ATTENTION_FUNCTIONS})
    for name, remedy in find_missing(namespace):
        raise UserError(f"{name} {getattr(namespace, name)}: {remedy}")


def check_mappings(args: Any) -> None:
    """The fields of TRL's DPOConfig that take a mapping, once it has read them.

    Raises:
        UserError: names the field, its value and what to do.
    """
    for name in ("model_init_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
        value = getattr(args, name)
        if not isinstance(value, dict | None):
            raise UserError(f"{name} {value}: must be a mapping such as {{a: 1}}")
    known = set(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"} | {"every_n_layers"}
    for key in args.gradient_checkpointing_kwargs or {}:
        check_known("gradient_checkpointing_kwargs", key, known)
    if args.lr_scheduler_kwargs:
        schedule = args.lr_scheduler_kwargs
        name = args.lr_scheduler_type.value
        try:  # on an optimizer that trains nothing
            get_scheduler(name, torch.optim.SGD([torch.zeros(1)]), 1, 2, schedule)
        except (TypeError, ValueError) as error:
            raise UserError(f"lr_scheduler_kwargs {schedule} with lr_scheduler_type {name}: {error}") from error
