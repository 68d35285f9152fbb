"""A short run of a recipe, for commands that check or measure something: offline, unpublished, without evaluation."""

from typing import Any

_EMPTIED = "deepspeed resume_from_checkpoint profile_steps eval_command eval_datasets metric_for_best_model".split()
SWITCHED_OFF = dict.fromkeys(_EMPTIED, "") | {"report_to": "none", "push_to_hub": False}
SWITCHED_OFF |= {"eval_fraction": 0, "eval_strategy": "no", "load_best_model_at_end": False, "guard_generations": 0}
SWITCHED_OFF["gradient_accumulation_steps"] = 1  # follows from the batch, which may be another one
# About the recipe's own rows
_OF_DATA = "datasets dataset_config max_samples filter_script drop_contaminated".split()
WITH_OTHER_DATA = dict.fromkeys(_OF_DATA, "") | {"dataset_train_split": "train", "drop_duplicates": "no"}
# Backend and mode would each set torch_compile
UNCOMPILED = {"torch_compile": False, "torch_compile_backend": "", "torch_compile_mode": ""}


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
