"""What the fields of a configuration affect: what a run may change when it resumes, and what explains a difference.

A field that is not named here affects the objective, the data or their order: with another value it is another run.
"""

# Names, places, checks, evaluation and the Hub: the trained weights are the same
NO_EFFECT = set(
    """output_dir resume_from_checkpoint verify_checkpoints save_steps save_total_limit
    report_to run_name project trackio_space_id logging_steps logging_first_step disable_tqdm
    log_level profile_steps push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision
    eval_strategy eval_steps eval_datasets eval_command dataset_num_proc dataloader_num_workers dataloader_pin_memory
    ddp_timeout hang_timeout max_dropped_fraction preflight preflight_only preflight_samples guard guard_generations
    memory_gib""".split()
)
# How the same sums are split and computed: the trained weights are the same but for rounding. A loss that depends on
# the micro-batch is refused (config_checks.py), except the balancing loss of a mixture of experts, for which
# run/start.py compares the pairs per device. gradient_accumulation_steps follows from the number of processes,
# which it compares, too.
ROUNDING = set(
    """per_device_train_batch_size per_device_eval_batch_size precompute_ref_batch_size gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs
    checkpointed_layers flash_attention""".split()
)
# Affect only some data sets: run/start.py compares the hash of the tokens
COMPARED_BY_TOKENS = {"mask_tool_results"}

MAY_CHANGE = NO_EFFECT | ROUNDING | COMPARED_BY_TOKENS  # in a resumed run
