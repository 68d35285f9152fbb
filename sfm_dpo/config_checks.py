"""Checks of a configuration before any model or data is loaded: ranges, combinations, installed packages."""

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available
from trl import DatasetMixtureConfig, DPOConfig, ModelConfig

from sfm_dpo.common.errors import UserError, collect_errors, nearest, user_input

LOSS_TYPES = (
    "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down "
    "discopop sft"
).split()
# Losses whose log-ratios are means over response tokens; the others in TRL use sums.
LENGTH_NORMALIZED_LOSSES = {"sigmoid_norm", "ipo"}
# Of TRL's DPOTrainer.__init__, which raises for others after the model has been loaded
F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
F_DIVERGENCE_LOSSES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
SORTING_LOSSES = {"aot", "aot_unpaired"}  # their value depends on which pairs are sorted together

HELD_OUT = "eval"  # the pairs of eval_fraction, beside the names of eval_datasets
EVAL_METRICS = """loss rewards/chosen rewards/rejected rewards/margins rewards/average rewards/accuracies logps/chosen
    logps/rejected logps/accuracies logits/chosen logits/rejected entropy mean_token_accuracy""".split()

_COUNTS = """max_prompt_length max_samples preflight_samples global_batch_size per_device_train_batch_size
    per_device_eval_batch_size dataset_num_proc lora_r lora_alpha precompute_ref_batch_size ddp_timeout"""
_MOST = sys.float_info.max  # refuses infinity
_RANGES = [  # (lowest, highest, in words, fields); a field without a value is not checked
    (1, _MOST, "at least 1", _COUNTS),
    # save_total_limit: with 1, a run killed while saving may have no complete checkpoint
    (2, _MOST, "at least 2", "max_length save_total_limit"),
    (1e-30, _MOST, "above 0", "beta learning_rate memory_gib num_train_epochs save_steps logging_steps eval_steps"),
    (0, _MOST, "at least 0", "weight_decay adam_epsilon max_grad_norm guard_generations hang_timeout warmup_steps"),
    (0, _MOST, "at least 0", "checkpointed_layers"),
    (0, 1, "in 0..1", "max_dropped_fraction adam_beta1 adam_beta2 lora_dropout label_smoothing"),
    (0, 0.99, "at least 0 and below 1", "eval_fraction"),
    (0, 2**32 - 1, "at least 0 and below 2**32", "seed data_seed"),
]

# Fields of TRL and Transformers that break training, metrics, guard, preflight or resume
REFUSED = {
    "auto_find_batch_size": "would change the global batch; remove it",
    "enable_jit_checkpoint": "ranks could save at different steps; remove it, and stop a run with the file STOP",
    "ignore_data_skip": "a resumed run would train on some pairs twice; remove it",
    "label_smoothing_factor": "is for Trainer's cross-entropy; with loss_type robust or exo_pair set label_smoothing",
    "ld_alpha": "metrics, preflight and the check of step 0 would ignore its weights; remove it",
    "neftune_noise_alpha": "adds noise to the policy alone, so the loss would not start at ln 2; remove it",
    "save_only_model": "a run could not be resumed without its optimizer; remove it",
    "streaming": "pairs are checked before training, so they cannot be streamed",
    "sync_ref_model": "checkpoints do not store the synchronised reference, so a resumed run would lose it; remove it",
    "test_split_size": "set eval_fraction instead, which uses `seed`",
    "use_liger_kernel": "would apply to the policy but not to the reference; set torch_compile: true instead",
}


def main_loss(loss_types: list[str]) -> str:
    """The loss whose scale the logged rewards have: the first of a mixture that compares the two responses."""
    return next((loss for loss in loss_types if loss != "sft"), "sft")


def find_conflicts(c: argparse.Namespace, world_size: int, training: bool) -> Iterator[tuple[str, str]]:
    """Fields whose value conflicts with others or, with `training`, with this machine; each with its remedy."""
    if not c.model_name_or_path:
        yield "model_name_or_path", "give a Hub id or a folder"
    if "\n" in c.output_dir:
        yield "output_dir", "contains a line break; remove it"
    if c.output_dir.startswith("$"):
        yield "output_dir", "variables are replaced by a shell only; write the path"
    if not c.dataset_name and not c.datasets:
        yield "dataset_name", "give a Hub id, a .json/.jsonl/.parquet file or a folder"
    if c.dataset_name and c.datasets:
        yield "dataset_name", "datasets is also set; keep one of them, or empty the recipe's with --datasets="
    if c.max_prompt_length and c.max_length and c.max_prompt_length >= c.max_length:
        yield "max_prompt_length", f"must be below max_length {c.max_length}, to leave room for the response"
    summed = [loss for loss in c.loss_type if loss not in {*LENGTH_NORMALIZED_LOSSES, "sft"}]
    if summed and c.beta >= 1 and not c.allow_unnormalized_beta:
        why = f"loss_type {summed[0]} sums log-probs over tokens, for which beta is usually 0.1"
        yield "beta", f"{why}; use loss_type sigmoid_norm, or beta 0.1, or allow_unnormalized_beta: true"
    yield from find_loss_conflicts(c, training)
    if c.max_steps != -1 and c.max_steps < 1:
        yield "max_steps", "nothing would be trained; give at least 1, or remove it to train num_train_epochs"
    for field in dataclasses.fields(ModelConfig) if c.use_peft is None else ():
        if field.name.startswith(("lora_", "use_rslora", "use_dora")) and vars(c)[field.name] != field.default:
            yield field.name, "has no effect without LoRA; set use_peft: true, or remove it"
    if c.use_peft and {"lm_head", "embed_out"} & {*(c.lora_target_modules or ())}:
        yield "lora_target_modules", "the fused LM head would ignore its adapter; remove it"
    if c.prefix_sharing and not c.padding_free:
        yield "prefix_sharing", "needs padding_free: true"
    if re.search(r"['\"](torch_dtype|dtype|revision)['\"]", str(c.model_init_kwargs)):
        yield "model_init_kwargs", "cannot set dtype or revision; set the fields dtype and model_revision instead"
    sharded = "true" in (os.environ.get("ACCELERATE_USE_DEEPSPEED"), os.environ.get("ACCELERATE_USE_FSDP"))
    if c.dtype in ("bfloat16", "float16") and not sharded and not c.use_peft:
        why = f"without DeepSpeed or FSDP there are no fp32 master weights; updates of {c.learning_rate:g} round to 0"
        yield "dtype", f"{why}; remove dtype (bf16: true still computes in bf16)"
    if c.checkpointed_layers and False in (c.gradient_checkpointing, c.activation_checkpointing):
        yield "checkpointed_layers", "gradient_checkpointing is false; remove one of the two"
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if "every_n_layers" in str(vars(c)[name]):
            yield name, "every_n_layers is set by the number of layers instead; set checkpointed_layers"
    if c.fit_memory and c.deepspeed:
        yield "deepspeed", "fit_memory: true needs accelerate launch --config_file"
    steps = c.profile_steps
    if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield "profile_steps", "must be the first and the last step to profile, for instance [10, 12]"
    if c.guard_generations and not c.eval_fraction:
        yield "guard_generations", "needs prompts: set eval_fraction"
    if c.eval_strategy != "no" and not c.eval_fraction and not c.eval_datasets:
        yield "eval_strategy", "there are no pairs to evaluate; set eval_fraction, for instance 0.02, or eval_datasets"
    if c.save_strategy == "best":
        yield "save_strategy", "a run could not be resumed; set load_best_model_at_end: true instead"
    if c.eval_command:
        yield from find_template_errors(c.eval_command, training)
        if c.save_strategy == "no":
            yield "save_strategy", "eval_command needs checkpoints; set it to steps or epoch"
    if c.metric_for_best_model or c.load_best_model_at_end:
        if not c.eval_strategy == c.save_strategy != "no":
            yield "eval_strategy", "set it and save_strategy to the same, steps or epoch, to find the best checkpoint"
        if c.save_strategy == "steps" and (c.eval_steps or c.logging_steps) != c.save_steps:
            yield "eval_steps", f"each evaluated step must be a checkpoint; set it to save_steps, {c.save_steps:g}"
    unit = c.per_device_train_batch_size * world_size
    size = f"per_device_train_batch_size {c.per_device_train_batch_size} x {world_size} process(es)"
    if c.global_batch_size % unit:
        step = math.lcm(unit, 4 * world_size) if c.fit_memory else unit  # fit_memory may then choose up to four pairs
        below = c.global_batch_size // step * step
        sizes = f"{below} or {below + step}" if below else step
        yield "global_batch_size", f"is not a multiple of {size}; choose {sizes}"
    elif c.gradient_accumulation_steps not in (1, c.global_batch_size // unit):
        accumulated = f"global_batch_size {c.global_batch_size} of {size} makes it {c.global_batch_size // unit}"
        meant = unit * c.gradient_accumulation_steps
        yield "gradient_accumulation_steps", f"{accumulated}; remove the field, and set global_batch_size: {meant}"
    if training and c.attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
        yield "attn_implementation", "needs flash-attn and a GPU; remove it: padding_free: true works without both"
    gpus = torch.cuda.device_count()
    if training and world_size == 1 and gpus > 1 and not c.use_cpu:
        yield "use_cpu", f"one process sees {gpus} GPUs; use accelerate launch, or set CUDA_VISIBLE_DEVICES=0"
    launched = "LOCAL_RANK" in os.environ or any(name.startswith("ACCELERATE_USE_") for name in os.environ)
    if training and c.deepspeed and not launched:
        yield "deepspeed", "no launcher started this process; use accelerate launch --config_file ..., which sets it"


def find_loss_conflicts(c: argparse.Namespace, training: bool) -> Iterator[tuple[str, str]]:
    """Fields that one of the losses does not support or that would make it depend on the micro-batch."""
    losses = set(c.loss_type)
    if not losses:
        yield "loss_type", "nothing would be trained; give a loss, for instance sigmoid_norm"
    weights = c.loss_weights or [1]
    if not min(weights) >= 0 < max(weights) < math.inf:
        yield "loss_weights", "give weights of at least 0, one of them above 0"
    if "exo_pair" in losses and not c.label_smoothing:
        yield "label_smoothing", "exo_pair needs a value above 0, for instance 0.001"
    if "robust" in losses and c.label_smoothing >= 0.5:
        yield "label_smoothing", "robust needs a value below 0.5, the share of swapped labels"
    if c.f_divergence_type != "reverse_kl" and (others := losses - F_DIVERGENCE_LOSSES):
        yield "f_divergence_type", f"loss_type {min(others)} supports only reverse_kl; remove the field"
    if c.use_weighting and (others := losses & {*SORTING_LOSSES, "sft"}):
        yield "use_weighting", f"loss_type {min(others)} has no loss of a single pair; remove one of the two"
    if not losses & SORTING_LOSSES:
        return
    if training and c.per_device_train_batch_size != c.global_batch_size:
        yield "loss_type", "sorts the pairs of a micro-batch, which must be the global batch of a single process"
    if c.eval_fraction or c.eval_datasets:
        yield "loss_type", "sorts the pairs of an evaluation batch; remove eval_fraction and eval_datasets"


def check_fields(namespace: argparse.Namespace, world_size: int, training: bool) -> list[str]:
    """What is wrong with ranges and combinations, each with the field, its value and the remedy. Changes wrong values,
    so that those that depend on them can be checked."""
    values = vars(namespace)
    problems: list[str] = []
    for lowest, highest, words, names in _RANGES:
        for name in names.split():
            value = values[name]
            if value is not None and not lowest <= value <= highest:
                problems.append(f"{name} {value}: must be {words}")
                values[name] = min(max(value, lowest), highest)
    for loss in namespace.loss_type:
        with collect_errors(problems):
            check_known("loss_type", loss, LOSS_TYPES)
    namespace.loss_type = [loss if loss in LOSS_TYPES else "sigmoid_norm" for loss in namespace.loss_type]
    with collect_errors(problems):
        check_known("f_divergence_type", namespace.f_divergence_type, F_DIVERGENCES)
    if re.search(r"['\"](use_auth_)?token['\"]", str(namespace.model_init_kwargs)):  # the error omits its value
        problems.append("model_init_kwargs: its token would be stored with the run; put HF_TOKEN into .env instead")
    reported = {problem.split()[0].rstrip(":") for problem in problems}
    refused = [(name, remedy) for name, remedy in REFUSED.items() if values[name] != default_of(name)]
    for name, remedy in [*refused, *find_conflicts(namespace, world_size, training)]:
        if name not in reported:
            problems.append(f"{name} {values[name]}: {remedy}")
    if problems:
        return problems
    with collect_errors(problems):
        prefixes = [f"eval_{name}_" for name in read_eval_sets(namespace.eval_datasets)]
        if namespace.eval_fraction:
            prefixes.append("eval_")
        if namespace.metric_for_best_model or namespace.load_best_model_at_end:
            metric = (namespace.metric_for_best_model or "loss").removeprefix("eval_")
            known = [prefix + name for prefix in prefixes for name in EVAL_METRICS]  # those that are computed
            check_known("metric_for_best_model", f"eval_{metric}", known)
    return problems


def check_length_of_run(args: Any, pairs: int) -> None:
    """Raises UserError if an epoch of `pairs` pairs ends the run before its warm-up."""
    steps = args.max_steps if args.max_steps > 0 else math.ceil(pairs / args.global_batch_size * args.num_train_epochs)
    if args.get_warmup_steps(steps) > steps:
        raise UserError(
            f"warmup_steps {args.warmup_steps:g}: the run has only {steps} steps; give a share, such as 0.1"
        )


def default_of(name: str) -> Any:
    """The default of a field of TRL."""
    return getattr(DPOConfig, name) if hasattr(DPOConfig, name) else getattr(DatasetMixtureConfig, name)


def find_template_errors(template: str, training: bool) -> Iterator[tuple[str, str]]:
    """Errors in an eval_command, each with its remedy."""
    example = "for instance: sbatch my_eval.sh {checkpoint} {step} {out}"
    words: list[str] = []
    try:
        words = [word.format(checkpoint="<checkpoint>", step=0, out="<out>") for word in shlex.split(template)]
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        yield "eval_command", f"cannot be read ({error!r}); {example}; double any other brace"
    for name in ("checkpoint", "out"):
        if f"<{name}>" not in " ".join(words):
            yield "eval_command", f"lacks {{{name}}}; {example}"
    if "--parsable" in words:
        yield "eval_command", "remove --parsable: the job's id is read from sbatch's usual line"
    if training and words and not shutil.which(words[0]):
        yield "eval_command", f"command {words[0]} not found; give its path, or make it executable (chmod +x)"


def check_known(field: str, name: Any, known: Iterable[str]) -> None:
    """Raises UserError if `name`, a value of `field`, is not among the known ones."""
    if name not in known:
        near = nearest(name, known) or f"; the known ones are {', '.join(sorted(known))}"
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
