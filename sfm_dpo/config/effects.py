"""The table of fields: each field of TRL's and of our dataclasses (config/fields.py) is in one of these sets. They say
what it affects, so what a run may change when it resumes and what explains a difference, or that it is refused. Also a
short run of a recipe, for commands that check or measure something.
"""

from typing import Any

# Fields of TRL and Transformers that have no effect here (docs/reference.md); a start warns about a value for them
UNUSED = set(
    """average_tokens_across_devices batch_eval_metrics bnb_4bit_quant_storage bnb_4bit_quant_type dataloader_drop_last
    do_eval do_predict do_train eval_accumulation_steps eval_do_concat_batches eval_on_start eval_use_gather_object
    greater_is_better include_for_metrics label_names length_column_name liger_kernel_config local_rank
    logging_nan_inf_filter prediction_loss_only ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns
    use_bnb_nested_quant use_cache""".split()
)
# Fields of TRL and Transformers that break training, metrics, guard, preflight or resume, and the remedy
REFUSED = {
    "accelerator_config": "pairs are dealt to the ranks by the sampler; remove it",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "the model would be saved in 16 bit; remove it"),
    "auto_find_batch_size": "would change the global batch; remove it",
    "dataloader_in_order": "steps would have other pairs; remove it",
    "deepspeed": "a launcher sets its own; remove it, and use accelerate launch --config_file accelerate_config.yaml",
    "enable_jit_checkpoint": "ranks could save at different steps; remove it, and stop a run with the file STOP",
    "fp16": "policy and reference would be computed in different precisions; remove it, and set bf16: true on a GPU",
    **dict.fromkeys(("fsdp", "fsdp_config"), "a launcher sets its own; remove it, and use LAUNCH=fsdp2"),
    "hub_always_push": "a checkpoint is not pushed while the push of an earlier one is running; remove it",
    "hub_token": "would be stored with the run; remove it, and put HF_TOKEN into .env",
    "ignore_data_skip": "a resumed run would train on some pairs twice; remove it",
    "label_smoothing_factor": "is for Trainer's cross-entropy; remove it; robust and exo_pair use label_smoothing",
    "ld_alpha": "metrics, preflight and the check of step 0 would ignore its weights; remove it",
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "quantised weights are untested here; remove it"),
    "load_best_model_at_end": "remove it, and push the best checkpoint: scripts/push_to_hub.py RUN/checkpoint-N",
    "metric_for_best_model": "remove it, compare eval_loss by step, and push the best checkpoint",
    "neftune_noise_alpha": "adds noise to the policy alone, so the loss would not start at ln 2; remove it",
    "parallelism_config": "a sequence is not split between GPUs; remove it",
    "restore_callback_states_from_checkpoint": "callbacks are restored without it; remove it",
    "save_on_each_node": "all nodes read the checkpoints of one shared folder; remove it",
    "save_only_model": "a run could not be resumed without its optimizer; remove it",
    "streaming": "pairs are checked before training, so they cannot be streamed; remove it",
    "sync_ref_model": "checkpoints do not store the synchronised reference, so a resumed run would lose it; remove it",
    "test_split_size": "remove it, and set eval_fraction, which uses `seed`",
    "use_liger_kernel": "would apply to the policy but not to the reference; remove it, and set torch_compile: true",
}
# Names, places, checks, evaluation and the Hub: the trained weights are the same
NO_EFFECT = UNUSED | set(
    """output_dir resume_from_checkpoint verify_checkpoints save_strategy save_steps save_total_limit save_dtype
    report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id logging_strategy
    logging_steps logging_first_step disable_tqdm log_level log_level_replica log_on_each_node
    include_num_input_tokens_seen skip_memory_metrics debug profile_steps push_to_hub hub_model_id hub_strategy
    hub_private_repo hub_revision eval_strategy eval_steps eval_delay eval_datasets eval_command dataset_num_proc
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context ddp_backend ddp_timeout hang_timeout hub_timeout max_dropped_fraction preflight
    preflight_only preflight_samples guard guard_generations memory_gib torch_empty_cache_steps""".split()
)
# How the same sums are split and computed: the trained weights are the same but for rounding. A loss that depends on
# the micro-batch is refused (config/checks.py), except the balancing loss of a mixture of experts, for which
# memory/asked.py keeps pairs per device and packing. gradient_accumulation_steps follows from the number of processes,
# which run/start.py compares.
ROUNDING = set(
    """per_device_train_batch_size per_device_eval_batch_size precompute_ref_batch_size gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs
    activation_offloading checkpointed_layers padding_free prefix_sharing flash_attention use_cpu torch_compile
    torch_compile_backend torch_compile_mode ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters
    ddp_static_graph pad_to_multiple_of""".split()
)
# The data, which pairs a step has, and the weights and optimizer whose states a checkpoint holds: it is continued with
# the same ones, also in another output_dir
INHERITED = set(
    """seed data_seed global_batch_size train_sampling_strategy max_length max_prompt_length truncation_mode overlong
    optim optim_target_modules use_peft use_dora lora_r lora_target_modules lora_target_parameters
    lora_modules_to_save""".split()
)
# Which tokens are trained, in some data sets: run/start.py compares the hash of the tokens
TOKENS = {"mask_tool_results", "template_date"}
# Model, data, objective and optimizer: with another value it is another run
WEIGHTS = set(
    """model_name_or_path model_revision ref_model_name_or_path trust_remote_code dtype attn_implementation
    model_init_kwargs disable_dropout pad_token lora_alpha lora_dropout lora_task_type use_rslora dataset_name
    dataset_config dataset_train_split datasets max_samples eval_fraction filter_script drop_duplicates
    loss_type loss_weights beta label_smoothing f_divergence_type f_alpha_divergence_coef discopop_tau use_weighting
    router_aux_loss_coef allow_unnormalized_beta precompute_ref_log_probs
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps num_train_epochs max_steps optim_args
    weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 tf32 full_determinism""".split()
)
MAY_CHANGE = NO_EFFECT | ROUNDING | TOKENS  # in a resumed run

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
