"""Preference evaluation without a benchmark: the held-out metrics of a trained model on another preference set."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from transformers.utils import ADAPTER_CONFIG_NAME

from sfm_dpo.config import parse_config
from sfm_dpo.config_checks import EVAL_METRICS, HELD_OUT
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.hub.publish import Source
from sfm_dpo.model.loading import model_init_kwargs
from sfm_dpo.train.reference_cache import add_reference
from sfm_dpo.train.trainer import SFMDPOTrainer

# Fields of the run that decide what becomes of a text and what a reward is
_FIELDS = """model_name_or_path model_revision trust_remote_code max_length max_prompt_length pad_token seed
    dataset_num_proc max_dropped_fraction beta loss_type label_smoothing padding_free attn_implementation""".split()


def evaluate_pairs(source: Source, model: Path, dataset: str, limit: int | None) -> dict[str, Any]:
    """Name, number of pairs, and the metrics that `eval_datasets` would have given, without `eval_`.

    The reference is the run's base model; its log-probs come from the reference cache or go there.

    Args:
        model: folder of the trained model's complete weights, or of its adapter.
        dataset: a Hub id, a file or a folder, as dataset_name; texts are prepared as in the run.
        limit: this many of the pairs, drawn with the run's seed.

    Raises:
        UserError: as the training would of these data.
    """
    options = []
    for name in _FIELDS:
        value = source.config.get(name)
        if value is not None:
            words = value if isinstance(value, list) else [value]
            options += [f"--{name}", *map(str, words)]
    on_gpu = torch.cuda.is_available()
    options += ["--bf16", str(on_gpu), "--use_cpu", str(not on_gpu), "--dtype", "auto" if on_gpu else "float32"]
    options += ["--dataset_name", dataset, "--precompute_ref_log_probs", "true", "--output_dir", str(model)]
    options += ["--report_to", "none", "--per_device_train_batch_size", "1", "--global_batch_size", "1"]
    if limit:
        options += ["--max_samples", str(limit)]
    config = parse_config(options)
    tokenizer = load_tokenizer(config)
    pairs = load_token_pairs(config, tokenizer).train
    config.train.model_init_kwargs = model_init_kwargs(config)
    adapter = PeftConfig.from_pretrained(model) if (model / ADAPTER_CONFIG_NAME).is_file() else None
    trainer = SFMDPOTrainer(
        model=config.model.model_name_or_path,
        args=config.train,
        train_dataset=pairs,
        eval_dataset={HELD_OUT: pairs},
        processing_class=tokenizer,
        peft_config=adapter,
    )
    add_reference(trainer)
    trainer._load_from_checkpoint(str(model))  # the trained weights in the place of the base model's
    trainer.evaluate()
    logged = trainer.state.log_history[-1]
    name = Path(dataset).name if Path(dataset).exists() else dataset
    metrics = {name: logged[f"eval_{name}"] for name in EVAL_METRICS if f"eval_{name}" in logged}
    return {"source": name, "pairs": len(pairs)} | metrics
