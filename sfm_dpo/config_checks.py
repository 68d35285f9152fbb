"""Checks of a configuration before any model or data is loaded: ranges, combinations, what is installed."""

import importlib.util
import inspect
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import get_scheduler
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from sfm_dpo.common.errors import UserError, nearest

# Losses whose log-ratios are means over response tokens; the others in TRL use sums.
LENGTH_NORMALIZED_LOSSES = {"sigmoid_norm", "ipo"}


def main_loss(loss_types: list[str]) -> str:
    """The loss of a mixture on whose scale rewards are logged: the first that compares the two responses."""
    return next((loss for loss in loss_types if loss != "sft"), "sft")


LOSS_TYPES = (
    "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down "
    "discopop sft"
).split()

# (test, what a value must be, fields); null passes every test
_RANGES = [
    (
        lambda v: v >= 1,
        "at least 1",
        "max_prompt_length max_samples preflight_samples global_batch_size per_device_train_batch_size "
        "per_device_eval_batch_size dataset_num_proc max_pairs_per_prompt min_response_tokens max_response_tokens "
        "max_length_ratio lora_r hub_push_every precompute_ref_batch_size ddp_timeout",
    ),
    (lambda v: v >= 2, "at least 2", "max_length"),
    (lambda v: v >= 2, "at least 2: with 1, a kill while saving can leave no complete checkpoint", "save_total_limit"),
    (lambda v: v > 0, "above 0", "beta learning_rate memory_gib"),
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


HELD_OUT = "eval"  # the pairs of eval_fraction, beside the names of eval_datasets
EVAL_METRICS = """loss rewards/chosen rewards/rejected rewards/margins rewards/average rewards/accuracies logps/chosen
    logps/rejected logps/accuracies logits/chosen logits/rejected entropy mean_token_accuracy""".split()


def read_eval_sets(text: str | None) -> dict[str, dict[str, str]]:
    """`eval_datasets`: by name the path of each set, and its configuration `name` and `split` where given.

    Raises:
        UserError: names the set and what is wrong with it.
    """
    try:
        sets = {name: {"path": v} if isinstance(v, str) else dict(v) for name, v in json.loads(text or "{}").items()}
        if not all(isinstance(v, str) for entry in sets.values() for v in (entry["path"], *entry.values())):
            raise ValueError
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        remedy = "must be a mapping of names to sets, such as {math: math.jsonl, code: {path: org/set, split: test}}"
        raise UserError(f"eval_datasets {text}: {remedy}") from error
    for name, entry in sets.items():
        if not re.fullmatch(r"[\w-]+", name) or name in (HELD_OUT, "train"):
            raise UserError(f"eval_datasets {name}: give a name of letters and digits other than {HELD_OUT} and train")
        for key in entry:
            check_known(f"eval_datasets {name}:", key, ("path", "name", "split"))
    return sets


def check_known(field: str, name: Any, known: Iterable[str]) -> None:
    """Raises UserError if `name`, a value of `field`, is not among the known ones."""
    if name not in known:
        near = nearest(name, known) or f"; the known ones are {', '.join(sorted(known))}"
        raise UserError(f"{field} {name}: is unknown{near}")


def check_fields(namespace: Any, world_size: int) -> None:
    """Ranges and combinations that argparse cannot see, once the precision is resolved.

    Raises:
        UserError: names the field, its value and what to do.
    """
    ns = namespace

    def require(ok: Any, name: str, remedy: str) -> None:
        if not ok:
            raise UserError(f"{name} {getattr(ns, name)}: {remedy}")

    for name, value in vars(ns).items():
        require(not isinstance(value, float) or math.isfinite(value), name, "must be a finite number")
    for test, remedy, names in _RANGES:
        for name in names.split():
            require(getattr(ns, name) is None or test(getattr(ns, name)), name, f"must be {remedy}")
    if ns.max_prompt_length and ns.max_length:
        remedy = f"must be below max_length {ns.max_length}, or no token is left for the response"
        require(ns.max_prompt_length < ns.max_length, "max_prompt_length", remedy)
    if ns.guard_generations:
        require(ns.eval_fraction, "guard_generations", "needs prompts: set eval_fraction")
        require(ns.guard != "skip", "guard_generations", "guard is skip; set guard: warn")
    if ns.profile_steps is not None:
        ordered = len(ns.profile_steps) == 2 and 1 <= ns.profile_steps[0] <= ns.profile_steps[1]
        require(ordered, "profile_steps", "must be the first and the last step to profile, for instance [10, 12]")
        reached = ns.max_steps < 1 or ns.profile_steps[1] <= ns.max_steps
        require(reached, "profile_steps", f"the run ends at step {ns.max_steps} (max_steps)")
    require(ns.fit_memory or ns.memory_gib is None, "memory_gib", "is the limit of fit_memory; set fit_memory: true")
    require(
        not (ns.fit_memory and ns.deepspeed), "deepspeed", "fit_memory: true needs accelerate launch --config_file"
    )
    if ns.push_to_hub and ns.save_strategy == "no":
        require(ns.hub_strategy == "end", "hub_strategy", "save_strategy is no; set hub_strategy: end")
    require(ns.padding_free or not ns.prefix_sharing, "prefix_sharing", "needs padding_free: true")
    require(ns.num_train_epochs > 0 or ns.max_steps > 0, "num_train_epochs", "must be above 0")
    remedy = "nothing is held out; set eval_fraction, for instance 0.02, or eval_datasets"
    sets = read_eval_sets(ns.eval_datasets)
    require(ns.eval_strategy == "no" or ns.eval_fraction or sets, "eval_strategy", remedy)
    require(ns.save_strategy != "best", "save_strategy", "nothing to go on from between; set load_best_model_at_end")
    if ns.metric_for_best_model or ns.load_best_model_at_end:
        prefixes = [*(["eval_"] if ns.eval_fraction else []), *(f"eval_{name}_" for name in sets)]
        metric = f"eval_{(ns.metric_for_best_model or 'loss').removeprefix('eval_')}"
        check_known("metric_for_best_model", metric, [prefix + name for prefix in prefixes for name in EVAL_METRICS])
        remedy = f"the best checkpoint must be an evaluated one; set it to save_strategy's value, {ns.save_strategy}"
        require(ns.eval_strategy == ns.save_strategy != "no", "eval_strategy", remedy)
        remedy = f"each evaluated step must be a checkpoint; set it to save_steps, {ns.save_steps:g}"
        same = ns.save_strategy != "steps" or (ns.eval_steps or ns.logging_steps) == ns.save_steps
        require(same, "eval_steps", remedy)
    for name, remedy in REFUSED.items():
        require(not getattr(ns, name), name, remedy)
    logged = ns.logging_strategy != "no" or ns.guard == "skip"
    require(logged, "logging_strategy", "the guard reads the log; remove it, or set guard: skip")
    checkpoint_exists = ns.resume_from_checkpoint is None or Path(ns.resume_from_checkpoint).is_dir()
    remedy = "no such checkpoint; remove it to go on from the newest one in output_dir"
    require(checkpoint_exists, "resume_from_checkpoint", remedy)
    if not ns.model_name_or_path:
        raise UserError("model_name_or_path is missing: give a Hub id or a folder")
    if not ns.dataset_name and not ns.datasets:
        raise UserError("dataset_name is missing: give a Hub id, a .json/.jsonl/.parquet file or a folder")
    if ns.dataset_name and ns.datasets:
        raise UserError("dataset_name and datasets are both set: keep one of them")

    weights = ns.loss_weights or []
    require(all(0 < weight < math.inf for weight in weights), "loss_weights", "must be above 0 and finite")
    require(ns.loss_type, "loss_type", "is empty; name at least one loss")
    for loss in ns.loss_type:
        check_known("loss_type", loss, LOSS_TYPES)
    summed = [loss for loss in ns.loss_type if loss not in {*LENGTH_NORMALIZED_LOSSES, "sft"}]
    if ns.beta >= 1 and summed and not ns.allow_unnormalized_beta:
        raise UserError(
            f"beta {ns.beta:g} with loss_type {summed[0]}: this loss uses sums over tokens, so it is stiffer than "
            "OLMo's length-normalised one by the length of the response; use loss_type sigmoid_norm, or beta 0.1, or "
            "say allow_unnormalized_beta: true if it is meant"
        )

    require(not ns.fp16 or not ns.use_cpu, "fp16", "no GPU is visible; on CPU leave it out")
    sharded = "true" in (os.environ.get("ACCELERATE_USE_DEEPSPEED"), os.environ.get("ACCELERATE_USE_FSDP"))
    if ns.dtype in ("bfloat16", "float16") and not sharded and not ns.use_peft:
        raise UserError(
            f"dtype {ns.dtype} without DeepSpeed or FSDP: there are no fp32 master weights, so updates at lr "
            f"{ns.learning_rate:g} round to zero; remove dtype (bf16: true still computes in bf16)"
        )
    check_batch(ns.global_batch_size, ns.per_device_train_batch_size, world_size, ns.gradient_accumulation_steps)


def check_batch(total: int, per_device: int, world_size: int, accumulation: int) -> None:
    """The global batch must be a multiple of what the processes take at once; an error offers what would be."""
    unit = per_device * world_size
    if total % unit:
        per_rank = [n for n in range(1, total + 1) if total % (n * world_size) == 0]
        worlds = [n for n in range(1, 129) if total % (per_device * n) == 0]
        lower = total // unit * unit
        offers = {
            "per_device_train_batch_size {}": ", ".join(map(str, per_rank[:8])),
            "global_batch_size {}": " or ".join(str(n) for n in (lower, lower + unit) if n),
            "{} process(es)": ", ".join(map(str, worlds[:8])),
        }
        raise UserError(
            f"global_batch_size {total} is not a multiple of per_device_train_batch_size {per_device} x {world_size} "
            f"process(es); these work: {'; '.join(text.format(n) for text, n in offers.items() if n)}"
        )
    if accumulation not in (1, total // unit):
        raise UserError(
            f"gradient_accumulation_steps {accumulation}: global_batch_size {total} on {world_size} process(es) makes "
            f"it {total // unit}; remove the field"
        )


def check_machine(namespace: Any) -> None:
    """Whether what is asked for is installed here and known to its library. For commands that compute.

    Raises:
        UserError: names the field, its value and what to do.
    """
    ns = namespace
    if ns.attn_implementation and "/" not in ns.attn_implementation:  # with a slash it is a kernel of the Hub
        check_known("attn_implementation", ns.attn_implementation, {"eager", *ALL_ATTENTION_FUNCTIONS})
        if ns.attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
            raise UserError(
                "attn_implementation flash_attention_2: flash-attn is not installed, or no GPU is visible; remove it: "
                "padding_free: true needs no such package"
            )
    if ns.use_cpu and ns.flash_attention != "auto":
        raise UserError(f"flash_attention {ns.flash_attention}: is a kernel of GPUs; on the CPU remove it")
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(ns, name) and importlib.util.find_spec("bitsandbytes") is None:
            raise UserError(f"{name} True: bitsandbytes is not installed; pip install bitsandbytes, or remove it")
    launched = "LOCAL_RANK" in os.environ or any(name.startswith("ACCELERATE_USE_") for name in os.environ)
    if ns.deepspeed and not launched:
        raise UserError(
            f"deepspeed {ns.deepspeed}: no launcher started this process; remove it and run accelerate launch "
            "--config_file ..., which brings it"
        )
    if ns.torch_compile_backend:
        known = torch._dynamo.list_backends(exclude_tags=())
        check_known("torch_compile_backend", ns.torch_compile_backend, known)
    if ns.torch_compile_mode:
        check_known("torch_compile_mode", ns.torch_compile_mode, {"default", *torch._inductor.list_mode_options()})
    if ns.optim_args and any(pair.count("=") != 1 for pair in ns.optim_args.split(",")):
        raise UserError(f"optim_args {ns.optim_args}: must be name=value, several joined by commas")


def check_mappings(args: Any) -> None:
    """The fields of TRL's DPOConfig that take a mapping, once it has read them.

    Raises:
        UserError: names the field, its value and what to do.
    """
    for name in ("model_init_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
        value = getattr(args, name)
        if not isinstance(value, dict | None):
            raise UserError(f"{name} {value}: must be a mapping such as {{a: 1}}")
    kwargs = args.model_init_kwargs or {}
    kernel = kwargs.get("attn_implementation")
    if kwargs.get("use_kernels") and importlib.util.find_spec("kernels") is None:
        raise UserError("model_init_kwargs use_kernels: kernels is not installed; pip install kernels, or remove it")
    if not isinstance(kernel, str | None):
        raise UserError(f"attn_implementation {kernel}: must be the name of a kernel")
    for key in args.gradient_checkpointing_kwargs or {}:
        known = set(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"} | {"every_n_layers"}
        check_known("gradient_checkpointing_kwargs", key, known)
    if args.lr_scheduler_kwargs:
        schedule, name = args.lr_scheduler_kwargs, args.lr_scheduler_type.value
        try:  # on an optimizer that trains nothing
            get_scheduler(name, torch.optim.SGD([torch.zeros(1)]), 1, 2, schedule)
        except (TypeError, ValueError) as error:
            raise UserError(f"lr_scheduler_kwargs {schedule} with lr_scheduler_type {name}: {error}") from error
