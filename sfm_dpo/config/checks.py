"""Checks of a configuration before any model or data is loaded: ranges, combinations, installed packages."""

import argparse
import csv
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from trl import DatasetMixtureConfig, DPOConfig, ModelConfig

from sfm_dpo.common.distributed import launch_name, launched_with
from sfm_dpo.common.errors import UserError, collect_errors, nearest, user_input
from sfm_dpo.config.effects import REFUSED

MIGRATION = Path(__file__).with_name("migration.csv")  # also the tables of docs/migration.md
LOSS_TYPES = (
    "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down "
    "discopop sft"
).split()
# Losses whose log-ratios are means over response tokens; the others in TRL use sums.
LENGTH_NORMALIZED_LOSSES = {"sigmoid_norm", "ipo"}
SORTING_LOSSES = {"aot", "aot_unpaired"}  # their value depends on which pairs are sorted together
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
SUMMED_LOSSES = {*LOSS_TYPES} - LENGTH_NORMALIZED_LOSSES - {"sft"}

HELD_OUT = "eval"  # the pairs of eval_fraction, beside the names of eval_datasets

_COUNTS = """max_prompt_length max_samples preflight_samples global_batch_size per_device_train_batch_size
    per_device_eval_batch_size dataset_num_proc lora_r lora_alpha precompute_ref_batch_size ddp_timeout hub_timeout"""
_MOST = sys.float_info.max  # refuses infinity
_RANGES = [  # (lowest, highest, in words, fields); a field without a value is not checked
    (1, _MOST, "at least 1", _COUNTS),
    # save_total_limit: with 1, a run killed while saving may have no complete checkpoint
    (2, _MOST, "at least 2", "max_length save_total_limit"),
    (1e-30, _MOST, "above 0", "beta learning_rate memory_gib num_train_epochs save_steps logging_steps eval_steps"),
    (0, _MOST, "at least 0", "weight_decay adam_epsilon max_grad_norm guard_generations hang_timeout warmup_steps"),
    (0, _MOST, "at least 0", "checkpointed_layers dataloader_num_workers"),
    (0, 1, "in 0..1", "max_dropped_fraction adam_beta1 adam_beta2 lora_dropout label_smoothing"),
    (0, 0.99, "at least 0 and below 1", "eval_fraction"),
    (0, 2**32 - 1, "at least 0 and below 2**32", "seed data_seed"),
]
# What a launcher may bring in its environment: by variable, the value that works, and the remedy
BROUGHT = {
    "ACCELERATE_MIXED_PRECISION": ("no", "remove mixed_precision there, and set bf16 in the recipe"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "remove dynamo_config there, and set torch_compile in the recipe"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("false", "remove parallelism_config there"),
    "FSDP_VERSION": ("2", "set fsdp_version: 2 there, as configs/accelerate/fsdp2.yaml does"),
    # otherwise all ranks but rank 0 would have an empty reference model
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("false", "set fsdp_cpu_ram_efficient_loading: false there"),
}


def main_loss(loss_types: list[str]) -> str:
    """The loss whose scale the logged rewards have: the first of a mixture that compares the two responses."""
    return next((loss for loss in loss_types if loss != "sft"), "sft")


@functools.cache
def read_migration() -> dict[str, str]:
    """By field, or `field: value`, of other trainers: what to write here instead."""
    rows: dict[str, str] = {}
    with MIGRATION.open(newline="") as file:
        for row in csv.DictReader(file):
            here = row["here"] or "none"
            note = f" ({row['remark']})" if row["remark"] else ""
            for field in row["fields"].split(", "):
                rows.setdefault(field.split(".")[-1], here + note)
    return rows


def explain_migrated(text: str) -> str:
    """The end of an error message: what to write instead of another trainer's field or `field: value`, if known."""
    rows = read_migration()
    return f"; here: {rows[text]}, see docs/migration.md" if text in rows else ""


def explain_unknown(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`explain_migrated` of a field, or else the known name near it."""
    field_name = name.replace("-", "_").split(".")[-1]
    return explain_migrated(field_name) or nearest(field_name, known, prefix)


Conflict = tuple[str, str]  # a field, and the remedy


def list_data_conflicts(c: argparse.Namespace) -> Iterator[Conflict]:
    if not c.model_name_or_path:
        yield "model_name_or_path", "give a Hub id or a folder"
    if c.output_dir.startswith("$"):
        yield "output_dir", "variables are replaced by a shell only; write the path"
    for name in ("output_dir", "resume_from_checkpoint"):
        if launched_with() == "zero" and re.search(r"[*?[]", vars(c)[name] or ""):
            yield name, "DeepSpeed finds no checkpoint in a folder with *, ? or [ in its name; choose another"
    if not c.dataset_name and not c.datasets:
        yield "dataset_name", "give a Hub id, a .json/.jsonl/.parquet file or a folder"
    if c.dataset_name and c.datasets:
        yield "dataset_name", "datasets is also set; keep one of them, or empty the recipe's with --datasets="
    if c.max_prompt_length and c.max_length and c.max_prompt_length >= c.max_length:
        room = f"leaves no room for a response in max_length {c.max_length}"
        yield "max_prompt_length", f"{room}; set max_prompt_length: {c.max_length // 2}"


def list_objective_conflicts(c: argparse.Namespace, world_size: int, training: bool) -> Iterator[Conflict]:
    losses = {*c.loss_type} & {*LOSS_TYPES}
    weights = c.loss_weights or [1]
    summed = min(losses & SUMMED_LOSSES, default=None)
    sorts = losses & SORTING_LOSSES
    is_split = world_size > 1 or (training and c.per_device_train_batch_size not in (None, c.global_batch_size))
    if summed and c.beta >= 1 and not c.allow_unnormalized_beta:
        why = f"loss_type {summed} sums log-probs over tokens, for which beta is usually 0.1"
        yield "beta", f"{why}; use loss_type sigmoid_norm, or beta 0.1, or allow_unnormalized_beta: true"
    if not c.loss_type:
        yield "loss_type", "nothing would be trained; give a loss, for instance sigmoid_norm"
    if not min(weights) >= 0 < max(weights) < math.inf:
        yield "loss_weights", "give weights of at least 0, one of them above 0"
    if sorts and is_split:
        yield "loss_type", "sorts the pairs of a micro-batch, which must be the global batch of a single process"
    if sorts and (c.eval_fraction or c.eval_datasets):
        yield "loss_type", "sorts the pairs of an evaluation batch; remove eval_fraction and eval_datasets"
    if c.max_steps < 1 and c.max_steps != -1:
        yield "max_steps", "nothing would be trained; give at least 1, or remove it to train num_train_epochs"


def list_lora_conflicts(c: argparse.Namespace) -> Iterator[Conflict]:
    if c.use_peft and launched_with() == "fsdp":
        yield "use_peft", "FSDP2 would put the whole policy on each GPU; launch with ZeRO-2 or ZeRO-3"
    for field in dataclasses.fields(ModelConfig):
        is_of_lora = field.name.startswith(("lora_", "use_rslora", "use_dora"))
        if is_of_lora and c.use_peft is None and vars(c)[field.name] != field.default:
            yield field.name, "has no effect without LoRA; set use_peft: true, or remove it"


def list_batch_conflicts(c: argparse.Namespace, world_size: int) -> Iterator[Conflict]:
    given = c.per_device_train_batch_size
    unit = max(1, given or 1) * world_size
    accumulation = {1, c.global_batch_size // unit} if given else {1}
    if c.global_batch_size % unit:
        step = unit if given else math.lcm(unit, 4 * world_size)  # which leaves the choice of up to four pairs
        size = math.ceil(c.global_batch_size / step) * step
        pairs = f"per_device_train_batch_size {given} x " if given else ""
        yield "global_batch_size", f"is not a multiple of {pairs}{world_size} process(es); choose {size}"
    elif c.gradient_accumulation_steps not in accumulation:
        pairs = f"the pairs per device (TRL's default: {DPOConfig.per_device_train_batch_size})"
        product = f"{c.gradient_accumulation_steps} x {world_size} process(es) x {given or pairs}"
        meant = f"{given * c.gradient_accumulation_steps * world_size} ({product})" if given else product
        remedy = f"remove the field, and set global_batch_size: {meant}"
        yield "gradient_accumulation_steps", f"follows from global_batch_size {c.global_batch_size}; {remedy}"
    if c.checkpointed_layers and False in (c.gradient_checkpointing, c.activation_checkpointing):
        yield "checkpointed_layers", "gradient_checkpointing is false; remove one of the two"
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if "every_n_layers" in str(vars(c)[name]):
            yield name, "every_n_layers is set by the number of layers instead; set checkpointed_layers"
    if c.prefix_sharing and c.padding_free is False:
        yield "prefix_sharing", "needs packed sequences; remove padding_free: false"


def list_evaluation_conflicts(c: argparse.Namespace, training: bool) -> Iterator[Conflict]:
    steps = c.profile_steps
    if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield "profile_steps", "must be the first and the last step to profile, for instance [10, 12]"
    if c.guard_generations and not c.eval_fraction:
        yield "guard_generations", "needs prompts; set eval_fraction: 0.02"
    if c.guard_generations and launch_name() in ("fsdp2", "zero3"):
        yield "guard_generations", "needs the full weights on each rank; use ZeRO-2, or set 0"
    if c.logging_strategy == "no" and c.guard != "skip":
        yield "logging_strategy", "the guard reads the log; remove it, or set guard: skip"
    if c.eval_strategy != "no" and not c.eval_fraction and not c.eval_datasets:
        yield "eval_strategy", "there are no pairs to evaluate; set eval_fraction: 0.02, or eval_datasets"
    if c.save_strategy == "best":
        yield "save_strategy", "a run could not be resumed; set save_strategy: steps"
    for error in find_template_errors(c.eval_command, training):
        yield "eval_command", error
    if c.eval_command and c.save_strategy == "no":
        yield "save_strategy", "eval_command needs checkpoints; set save_strategy: steps"


def list_machine_conflicts(c: argparse.Namespace, world_size: int, training: bool) -> Iterator[Conflict]:
    """The conflicts with this machine, of which all but that of `dtype` count only with `training`."""
    gpus = torch.cuda.device_count()
    if training and launched_with() == "fsdp" and c.ref_model_name_or_path and c.preflight != "skip":
        yield "preflight", "under FSDP2 it would score the reference; run scripts/preflight.py, then set it to skip"
    is_16_bit = c.dtype in ("bfloat16", "float16") and not c.use_peft
    rounded = f"there are no fp32 master weights; updates of {c.learning_rate:g} round to 0; remove dtype"
    if is_16_bit and launched_with() == "none":
        yield "dtype", f"without DeepSpeed or FSDP {rounded} (bf16: true still computes in bf16)"
    if is_16_bit and launched_with() == "fsdp" and not c.bf16:
        yield "dtype", f"under FSDP2 without bf16: true {rounded}"
    if training and world_size == 1 and gpus > 1 and not c.use_cpu:
        yield "use_cpu", f"one process sees {gpus} GPUs; use accelerate launch, or set CUDA_VISIBLE_DEVICES=0"


def list_changed(namespace: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Those of these fields of TRL and Transformers that have neither their default nor an empty value."""
    fields = [field for part in (DPOConfig, ModelConfig, DatasetMixtureConfig) for field in dataclasses.fields(part)]
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    return [name for name in sorted(names) if (vars(namespace)[name] or None) != (defaults.get(name) or None)]


def check_fields(namespace: argparse.Namespace, world_size: int, training: bool) -> list[str]:
    """What is wrong with ranges and combinations, each with the field, its value and the remedy."""
    values = vars(namespace)
    problems: list[str] = []
    for variable, (good, remedy) in BROUGHT.items():
        value = os.environ.get(variable, good).lower()
        if training and value != good and not (namespace.bf16 and value == "bf16"):
            problems.append(f"{variable} {value}: comes from the launch configuration or its options; {remedy}")
    for lowest, highest, words, names in _RANGES:
        for name in names.split():
            value = values[name]
            if value is not None and not lowest <= value <= highest:
                problems.append(f"{name} {value}: must be {words}")
    for loss in namespace.loss_type:
        with collect_errors(problems):
            check_known("loss_type", loss, LOSS_TYPES)
    with collect_errors(problems):
        check_known("f_divergence_type", namespace.f_divergence_type, DIVERGENCES)
    if re.search(r"['\"](token|torch_dtype|dtype|revision)['\"]", str(namespace.model_init_kwargs)):
        remedy = "use HF_TOKEN in .env, and the fields dtype and model_revision"
        problems.append(f"model_init_kwargs: cannot set a token, dtype or revision; {remedy}")  # without the token
    reported = {problem.split()[0].rstrip(":") for problem in problems}
    changed = list_changed(namespace, REFUSED.keys() - {"accelerator_config"})  # checked where it is read
    conflicts = [  # also of values that are out of their range
        *((name, REFUSED[name]) for name in changed),
        *list_data_conflicts(namespace),
        *list_objective_conflicts(namespace, world_size, training),
        *list_lora_conflicts(namespace),
        *list_batch_conflicts(namespace, world_size),
        *list_evaluation_conflicts(namespace, training),
        *list_machine_conflicts(namespace, world_size, training),
    ]
    for name, remedy in conflicts:
        if name not in reported:
            problems.append(f"{name} {'***' if name == 'hub_token' else values[name]}: {remedy}")
    with collect_errors(problems):
        read_eval_sets(namespace.eval_datasets)
    return problems


def check_length_of_run(args: Any, pairs: int = 0) -> None:
    """Raises UserError if a run, of max_steps or else on `pairs` pairs, ends before its warm-up does: one step would
    change no weight."""
    steps = args.count_steps(pairs)
    remedy = f"use a smaller global_batch_size for these {pairs} pairs"
    if args.max_steps > 0:
        remedy = "raise max_steps"
    has_warmup = args.lr_scheduler_type not in ("constant", "reduce_lr_on_plateau")
    if has_warmup and args.get_warmup_steps(steps) >= steps:
        share = 0.1 if steps > 1 else 0  # 0.1 leaves at least a step of warm-up and one after it
        what = f"warmup_steps {args.warmup_steps:g}: the run has only {steps} step(s)"
        raise UserError(f"{what}; {remedy}, or set warmup_steps: {share}")


def find_template_errors(template: str | None, training: bool) -> Iterator[str]:
    """What is wrong with an eval_command, each with its remedy."""
    if not template:
        return
    example = "for instance: sbatch my_eval.sh {checkpoint} {step} {out}"
    try:
        command = template.format(checkpoint="<checkpoint>", step=0, out="<out>")
        words = shlex.split(command)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        yield f"cannot be read ({error!r}); {example}; double any other brace"
        return
    if "<checkpoint>" not in command or "<out>" not in command:
        yield f"lacks {{checkpoint}} or {{out}}; {example}"
    elif training and not shutil.which(words[0]):
        yield f"command {words[0]} not found; give its path, or make it executable (chmod +x)"


def check_known(field: str, name: Any, known: Iterable[str]) -> None:
    """Raises UserError if `name`, a value of `field`, is not among the known ones."""
    if name not in known:
        every = f"; the known ones are {', '.join(sorted(known))}"
        near = explain_migrated(f"{field}: {name}") or nearest(name, known) or every
        raise UserError(f"{field} {name}: unknown{near}")


def read_eval_sets(text: str | None) -> dict[str, dict[str, str]]:
    """`eval_datasets` as a mapping from each set's name to its `path` and, if given, its `name` and `split`."""
    sets = {}
    example = "{math: math.jsonl, code: {path: org/set, split: test}}"
    remedy = f"no set is called {HELD_OUT} or train"
    with user_input(f"eval_datasets {text}: must be a mapping of names to sets, such as {example}", remedy):
        for name, entry in json.loads(text or "{}").items():
            sets[name] = {"path": entry} if isinstance(entry, str) else dict(entry)
            good_name = re.fullmatch(r"[\w-]+", name) and name not in (HELD_OUT, "train")
            path = sets[name].get("path")
            good_path = path and isinstance(path, str)
            if not good_name or not good_path or sets[name].keys() - {"path", "name", "split"}:
                raise ValueError(f"{name}: {entry}")
    return sets
