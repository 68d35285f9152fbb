"""Can it be meant? Ranges, combinations and precision of the fields, before any model or data is loaded."""

import difflib
import importlib.util
import inspect
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from sfm_dpo.common.errors import UserError

# Losses whose log-ratios are means over response tokens; the others in TRL use sums.
LENGTH_NORMALIZED_LOSSES = {"sigmoid_norm", "ipo"}
CHECKS = {
    "preflight": ("skip", "warn", "abort"),
    "guard": ("skip", "warn", "stop"),
    # Trainer's other two, checkpoint and all_checkpoints, would publish the optimizer: 80 GB of a 7B model each time
    "hub_strategy": ("end", "every_save"),
}
LOSS_TYPES = (
    "sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down "
    "discopop sft"
).split()

_AT_LEAST_1 = (
    "max_length max_prompt_length max_samples preflight_samples global_batch_size per_device_train_batch_size "
    "per_device_eval_batch_size dataset_num_proc lora_r hub_push_every precompute_ref_batch_size ddp_timeout"
).split()
_AT_LEAST_0 = "weight_decay adam_epsilon max_grad_norm data_seed dataloader_num_workers neftune_noise_alpha".split()
_IN_0_TO_1 = "max_dropped_fraction adam_beta1 adam_beta2 lora_dropout ld_alpha label_smoothing".split()


def require(ok: bool, name: str, value: Any, remedy: str) -> None:
    if not ok:
        raise UserError(f"{name} {value}: {remedy}")


def validate(ns, world_size: int, training: bool = True) -> None:
    """Combinations and ranges that argparse cannot see. Order: what the user is likeliest to have meant first."""
    for name, value in vars(ns).items():
        require(not isinstance(value, float) or math.isfinite(value), name, value, "must be a finite number")
    for name in _AT_LEAST_1:
        value = getattr(ns, name)
        require(value is None or value >= 1, name, value, "must be at least 1")
    for name in ("save_steps", "logging_steps", "eval_steps"):
        value = getattr(ns, name)
        require(value is None or value > 0, name, value, "must be above 0 (below 1: a share of all steps)")
    for name in _AT_LEAST_0:
        value = getattr(ns, name)
        require(value is None or value >= 0, name, value, "must be at least 0")
    for name in _IN_0_TO_1:
        value = getattr(ns, name)
        require(value is None or 0 <= value <= 1, name, value, "must be in 0..1")
    require(0 <= ns.seed < 2**32, "seed", ns.seed, "must be at least 0 and below 2**32")
    require(ns.max_length is None or ns.max_length >= 2, "max_length", ns.max_length, "must be at least 2")
    if ns.max_prompt_length is not None and ns.max_length is not None:
        remedy = f"must be below max_length {ns.max_length}, or no token is left for the response"
        require(ns.max_prompt_length < ns.max_length, "max_prompt_length", ns.max_prompt_length, remedy)
    require(0 <= ns.eval_fraction < 1, "eval_fraction", ns.eval_fraction, "must be at least 0 and below 1")
    for name, choices in CHECKS.items():
        require(getattr(ns, name) in choices, name, getattr(ns, name), f"must be one of {', '.join(choices)}")
    if ns.guard_generations:
        require(ns.guard_generations > 0, "guard_generations", ns.guard_generations, "must be at least 0")
        require(ns.eval_fraction > 0, "guard_generations", ns.guard_generations, "needs prompts: set eval_fraction")
        require(ns.guard != "skip", "guard_generations", ns.guard_generations, "guard is skip; set guard: warn")
    if ns.profile_steps is not None:
        remedy = "must be the first and the last step to profile, from 1 on, for instance [10, 12]"
        ordered = len(ns.profile_steps) == 2 and 1 <= ns.profile_steps[0] <= ns.profile_steps[1]
        require(ordered, "profile_steps", ns.profile_steps, remedy)
        reached = ns.max_steps < 1 or ns.profile_steps[1] <= ns.max_steps
        require(reached, "profile_steps", ns.profile_steps, f"the run ends at step {ns.max_steps} (max_steps)")
    if ns.hub_strategy == "every_save" and ns.push_to_hub:
        require(
            ns.save_strategy != "no", "hub_strategy", ns.hub_strategy, "save_strategy is no; set hub_strategy: end"
        )
    require(ns.beta > 0, "beta", ns.beta, "must be above 0")
    require(ns.learning_rate > 0, "learning_rate", ns.learning_rate, "must be above 0")
    require(ns.num_train_epochs > 0 or ns.max_steps > 0, "num_train_epochs", ns.num_train_epochs, "must be above 0")
    limit = ns.save_total_limit
    remedy = "keep at least 2: with 1, a kill while saving can leave no complete checkpoint"
    require(limit is None or limit >= 2, "save_total_limit", limit, remedy)
    if ns.eval_strategy != "no" and not ns.eval_fraction:
        raise UserError(f"eval_strategy {ns.eval_strategy}: nothing is held out; set eval_fraction, for instance 0.02")
    require(ns.truncation_mode == "keep_start", "truncation_mode", ns.truncation_mode, "only keep_start works")
    require(not ns.auto_find_batch_size, "auto_find_batch_size", True, "would change the global batch; remove it")
    require(not ns.streaming, "streaming", True, "pairs are checked before training, so they cannot be streamed")
    remedy = "set eval_fraction instead, which is seeded"
    require(ns.test_split_size is None, "test_split_size", ns.test_split_size, remedy)
    remedy = "no such checkpoint; remove it to go on from the newest one in output_dir"
    checkpoint = ns.resume_from_checkpoint
    require(checkpoint is None or Path(checkpoint).is_dir(), "resume_from_checkpoint", checkpoint, remedy)
    known = "reverse_kl forward_kl js_divergence alpha_divergence".split()
    remedy = f"must be one of {', '.join(known)}"
    require(ns.f_divergence_type in known, "f_divergence_type", ns.f_divergence_type, remedy)
    if not ns.model_name_or_path:
        raise UserError("model_name_or_path is missing: give a Hub id or a folder")
    if not ns.dataset_name and not ns.datasets:
        raise UserError("dataset_name is missing: give a Hub id, a .json/.jsonl/.parquet file or a folder")
    if ns.dataset_name and ns.datasets:
        raise UserError("dataset_name and datasets are both set: keep one of them")

    positive = ns.loss_weights is None or all(0 < weight < math.inf for weight in ns.loss_weights)
    require(positive, "loss_weights", ns.loss_weights, "must be above 0 and finite")
    require(bool(ns.loss_type), "loss_type", ns.loss_type, "is empty; name at least one loss")
    for loss in ns.loss_type:
        if loss not in LOSS_TYPES:
            near = nearest(loss, set(LOSS_TYPES)) or f"; the known ones are {', '.join(LOSS_TYPES)}"
            raise UserError(f"loss_type {loss!r} is unknown{near}")
    summed = [loss for loss in ns.loss_type if loss not in LENGTH_NORMALIZED_LOSSES and loss != "sft"]
    if ns.beta >= 1 and summed and not ns.allow_unnormalized_beta:
        raise UserError(
            f"beta {ns.beta:g} with loss_type {summed[0]}: this loss uses sums over tokens, so it is stiffer than "
            "OLMo's length-normalised one by the length of the response; use loss_type sigmoid_norm, or beta 0.1, or "
            "say allow_unnormalized_beta: true if it is meant"
        )

    unit = ns.per_device_train_batch_size * world_size
    if ns.global_batch_size % unit:
        raise UserError(
            f"global_batch_size {ns.global_batch_size} is not a multiple of per_device_train_batch_size "
            f"{ns.per_device_train_batch_size} x {world_size} process(es); these work: "
            + accumulation_choices(ns.global_batch_size, ns.per_device_train_batch_size, world_size)
        )
    _validate_precision(ns)
    if training:
        _validate_machine(ns)


def _validate_machine(ns) -> None:
    """Is what was asked for installed here, and known to the library that will be asked? For commands that compute."""
    kernel = ns.attn_implementation
    if kernel and "/" not in kernel:  # with a slash it is a kernel of the Hub
        known = {"eager", *ALL_ATTENTION_FUNCTIONS}
        near = nearest(kernel, known) or f"; the known ones are {', '.join(sorted(known))}"
        require(kernel in known, "attn_implementation", kernel, f"is unknown{near}")
        absent = kernel == "flash_attention_2" and not is_flash_attn_2_available()
        remedy = (
            "flash-attn is not installed, or no GPU is visible; remove it: padding_free: true needs no such package"
        )
        require(not absent, "attn_implementation", kernel, remedy)
    for name in ("load_in_4bit", "load_in_8bit"):
        absent = getattr(ns, name) and importlib.util.find_spec("bitsandbytes") is None
        require(not absent, name, True, "bitsandbytes is not installed; pip install bitsandbytes, or remove it")
    if ns.deepspeed:
        remedy = (
            "no launcher started this process; remove it and run accelerate launch --config_file ..., which brings it"
        )
        launched = "LOCAL_RANK" in os.environ or any(name.startswith("ACCELERATE_USE_") for name in os.environ)
        require(launched, "deepspeed", ns.deepspeed, remedy)
    if ns.torch_compile_backend:
        known = set(torch._dynamo.list_backends(exclude_tags=()))
        near = nearest(ns.torch_compile_backend, known) or f"; the known ones are {', '.join(sorted(known))}"
        require(
            ns.torch_compile_backend in known, "torch_compile_backend", ns.torch_compile_backend, f"is unknown{near}"
        )
    if ns.torch_compile_mode:
        known = {"default", *torch._inductor.list_mode_options()}
        remedy = f"must be one of {', '.join(sorted(known))}"
        require(ns.torch_compile_mode in known, "torch_compile_mode", ns.torch_compile_mode, remedy)
    pairs = (ns.optim_args or "").replace(" ", "").split(",")
    remedy = "must be name=value, several joined by commas"
    require(not ns.optim_args or all(p.count("=") == 1 for p in pairs), "optim_args", ns.optim_args, remedy)


def validate_mappings(args) -> None:
    """The fields of TRL's DPOConfig that take a mapping, once it has read them."""
    for name in ("model_init_kwargs", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
        value = getattr(args, name)
        require(value is None or isinstance(value, dict), name, value, "must be a mapping such as {a: 1}")
    kernel = (args.model_init_kwargs or {}).get("attn_implementation")
    require(kernel is None or isinstance(kernel, str), "attn_implementation", kernel, "must be the name of a kernel")
    known = set(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"}
    for key in args.gradient_checkpointing_kwargs or {}:
        near = nearest(key, known) or f"; the known ones are {', '.join(sorted(known))}"
        require(
            key in known, "gradient_checkpointing_kwargs", args.gradient_checkpointing_kwargs, f"unknown {key}{near}"
        )
    if args.lr_scheduler_kwargs:
        schedule, name = args.lr_scheduler_kwargs, args.lr_scheduler_type.value
        try:  # on an optimizer that trains nothing
            get_scheduler(name, torch.optim.SGD([torch.zeros(1)]), 1, 2, schedule)
        except (TypeError, ValueError) as error:
            raise UserError(f"lr_scheduler_kwargs {schedule} with lr_scheduler_type {name}: {error}") from error


def _validate_precision(ns) -> None:
    if not torch.cuda.is_available():
        # accelerate's launcher drops `use_cpu` of a DeepSpeed config file, and without it accelerate finds no backend:
        # each CPU process would believe that it is alone.
        ns.use_cpu = True
    on_gpu = not ns.use_cpu
    if ns.use_cpu and "LOCAL_RANK" in os.environ and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed  # takes seconds

        # DeepSpeed 0.19 would compile an all-reduce of its own for CPU: half a minute, and a process that is killed
        # meanwhile leaves a lock file for which every later start waits without end. gloo does as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if ns.bf16 is None and not ns.fp16:
        ns.bf16 = on_gpu  # TRL's default is true everywhere
    require(not ns.fp16 or on_gpu, "fp16", True, "no GPU is visible; on CPU leave it out")
    if ns.bf16 and not on_gpu:
        raise UserError("bf16 true: no GPU is visible; on CPU say --bf16 false (bf16 is some 20 times slower there)")
    sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if ns.dtype is None:
        # DeepSpeed makes fp32 master weights from a bf16 model: loading in bf16 halves the host memory.
        ns.dtype = "bfloat16" if ns.bf16 and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else "float32"
    elif ns.dtype in ("bfloat16", "float16") and not sharded and not ns.use_peft:
        raise UserError(
            f"dtype {ns.dtype} without DeepSpeed or FSDP: there are no fp32 master weights, so updates at lr "
            f"{ns.learning_rate:g} round to zero; remove dtype (bf16: true still computes in bf16)"
        )


def resolve_report_to(report_to: list[str]) -> tuple[list[str], str]:
    """Trackers that can work here, and a line that says so. W&B needs a key or WANDB_MODE=offline.

    A batch job must neither crash nor wait at a login prompt for want of a key.
    """
    trackers = [tracker for tracker in report_to if tracker != "none"]
    for tracker in trackers:
        if tracker not in INTEGRATION_TO_CALLBACK:  # also `all`, which would bring W&B and its login prompt
            names = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise UserError(f"report_to {tracker}: name one or several of {names}, or none")
        packages = {"tensorboard": ("tensorboard", "tensorboardX")}.get(tracker, (tracker,))
        if tracker in ("wandb", "trackio", "tensorboard") and not any(map(importlib.util.find_spec, packages)):
            raise UserError(f"report_to {tracker}: is not installed; pip install {tracker}, or remove it")
    usable = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled")
    if "wandb" in trackers and not usable:
        trackers.remove("wandb")
        return trackers, "W&B off: neither WANDB_API_KEY nor WANDB_MODE=offline is set"
    return trackers, f"tracking: {', '.join(trackers) or 'none'}"


def accumulation_choices(global_batch_size: int, per_device: int, world_size: int) -> str:
    """Combinations near the asked one that divide, for an error message."""
    per_rank = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * world_size) == 0]
    unit = per_device * world_size
    sizes = sorted({max(unit, global_batch_size // unit * unit), math.ceil(global_batch_size / unit) * unit})
    worlds = [n for n in range(1, 129) if global_batch_size % (per_device * n) == 0]
    choices = []
    if per_rank:
        choices.append(f"per_device_train_batch_size {', '.join(map(str, per_rank[:8]))}")
    choices.append(f"global_batch_size {' or '.join(map(str, sizes))}")
    if worlds:
        choices.append(f"{', '.join(map(str, worlds[:8]))} process(es)")
    return "; ".join(choices)


def nearest(name: Any, known: set[str], prefix: str = "") -> str:
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{match[0]}?" if match else ""
