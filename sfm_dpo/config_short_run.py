"""A short run of a recipe, for commands that check or measure something: offline, unpublished, without evaluation."""

from typing import Any

SWITCHED_OFF = {
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
# Fields about the recipe's own rows
WITH_OTHER_DATA = {
    **dict.fromkeys("datasets dataset_config max_samples filter_script".split(), ""),
    "dataset_train_split": "train",
    "drop_duplicates": "no",
}


def short_run(argv: list[str], dataset: Any = None, **fields: Any) -> list[str]:
    """`argv`, options of train_dpo.py, followed by options that switch off what a short run does without.

    `dataset` replaces the recipe's data and switches off their filters. `fields`: further options; None keeps the
    recipe's value.
    """
    values: dict[str, Any] = dict(SWITCHED_OFF)
    if dataset:
        values |= WITH_OTHER_DATA | {"dataset_name": dataset}
    values |= fields
    return [*argv, *(f"--{name}={value}" for name, value in values.items() if value is not None)]
