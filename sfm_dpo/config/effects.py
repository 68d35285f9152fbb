"""What the fields of a configuration affect: what a run may change when it resumes, and what explains a difference;
and a short run of a recipe, for commands that check or measure something.

A field that is not named here affects the objective, the data or their order: with another value it is another run.
"""

from typing import Any

# Names, places, checks, evaluation and the Hub: the trained weights are the same
NO_EFFECT = set(
    """output_dir resume_from_checkpoint verify_checkpoints save_steps save_total_limit save_dtype
    report_to run_name project trackio_space_id logging_steps logging_first_step disable_tqdm
    log_level profile_steps push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision
    eval_strategy eval_steps eval_datasets eval_command dataset_num_proc dataloader_num_workers dataloader_pin_memory
    ddp_timeout hang_timeout hub_timeout max_dropped_fraction preflight preflight_only preflight_samples guard
    guard_generations memory_gib""".split()
)
# How the same sums are split and computed: the trained weights are the same but for rounding. A loss that depends on
# the micro-batch is refused (config/checks.py), except the balancing loss of a mixture of experts, for which
# run/start.py compares the pairs per device. gradient_accumulation_steps follows from the number of processes,
# which it compares, too.
ROUNDING = set(
    """per_device_train_batch_size per_device_eval_batch_size precompute_ref_batch_size gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs
    checkpointed_layers flash_attention""".split()
)
# The data, and which pairs a step has: a checkpoint is continued with the same ones, also in another output_dir
ORDER = set(
    """seed data_seed global_batch_size train_sampling_strategy max_length max_prompt_length truncation_mode
    overlong""".split()
)
# In a resumed run. The last two affect only some data sets: run/start.py compares the hash of the tokens
MAY_CHANGE = NO_EFFECT | ROUNDING | {"mask_tool_results", "template_date"}

# What a short run of a recipe does without: it is offline, unpublished and not evaluated
SWITCHED_OFF: dict[str, Any] = {
    **dict.fromkeys("resume_from_checkpoint profile_steps eval_command eval_datasets eval_steps".split(), ""),
    "report_to": "none",
    "push_to_hub": False,
    "eval_fraction": 0,
    "eval_strategy": "no",
    "guard_generations": 0,
    "warmup_steps": 0,  # which may be longer than a short run
    "gradient_accumulation_steps": 1,  # follows from the batch, which may be another one
}


def short_run(argv: list[str], **fields: Any) -> list[str]:
    """`argv`, options of train_dpo.py, followed by options that switch off what a short run does without, and by
    `fields`, further options; None keeps the recipe's value."""
    values: dict[str, Any] = SWITCHED_OFF | fields
    return [*argv, *(f"--{name}={value}" for name, value in values.items() if value is not None)]
