"""A short run of a recipe, for commands that check or measure something: offline, unpublished, without evaluation."""

from typing import Any

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
# One pair at a time, chosen by no memory, for commands that do not train
ONE_PAIR = {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
# The last two would set the first
UNCOMPILED = {"torch_compile": False, "torch_compile_backend": "", "torch_compile_mode": ""}


def short_run(argv: list[str], **fields: Any) -> list[str]:
    """`argv`, options of train_dpo.py, followed by options that switch off what a short run does without, and by
    `fields`, further options; None keeps the recipe's value."""
    values: dict[str, Any] = SWITCHED_OFF | fields
    return [*argv, *(f"--{name}={value}" for name, value in values.items() if value is not None)]
