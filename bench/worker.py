"""One job of throughput.py in its own process: makes the model and pairs, or trains and measures one variant."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.benchmark
from datasets import Dataset, concatenate_datasets, load_from_disk
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer

from bench.lengths import MAX_LENGTH, sample_lengths
from bench.throughput import BATCH, DEMO, MODELS, ROOT, SHIPPED, VARIANTS, recipe_of
from sfm_dpo.calibration.choose_micro_batch import calibrate
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.pairs import Pairs
from sfm_dpo.memory.asked import Asked, read_asked
from sfm_dpo.model.flops import ForwardFlops, peak_flops
from sfm_dpo.model.loading import identify_models, load_model_config
from sfm_dpo.run.facts import RunFacts
from sfm_dpo.run.start import NEW
from sfm_dpo.train.base_model import base_model
from sfm_dpo.train.metrics import CountingCollator, Meter, peak_memory_gib
from sfm_dpo.train.reference_cache import add_reference
from sfm_dpo.train.trainer import SFMDPOTrainer

CPU_SHAPE = {"hidden_size": 256, "intermediate_size": 688, "vocab_size": 1024}
CPU_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # bf16 weights, as DeepSpeed's engine holds them


def scale_of(job: dict) -> int:
    """The divisor of lengths and windows."""
    if job["quick"]:
        return 128
    return 8 if DEVICE == "cpu" and job["lengths"] != "chat" else 1


def max_length_of(job: dict) -> int:
    return MAX_LENGTH[job["lengths"]] // scale_of(job)


def prepare(job: dict) -> dict:
    """Writes model and pairs into the scratch folder, and returns their description for the result."""
    scratch = Path(job["scratch"])
    torch.manual_seed(0)
    if job["model"] == "demo":
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=DTYPE)
    else:
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(model_config(job), dtype=DTYPE)
    config = model.config
    model.save_pretrained(scratch / "model")
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, config.vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(scratch / "model")

    lengths = sample_lengths(job["lengths"], job["pairs"] + BATCH * job["accumulation"])
    lengths = {name: np.maximum(2, tokens // scale_of(job)) for name, tokens in lengths.items()}
    lengths["prompt"] = np.minimum(lengths["prompt"], max_length_of(job) // 2)  # as the recipes' max_prompt_length
    rng = np.random.default_rng(1)
    columns: dict = {}
    for name, tokens in lengths.items():
        below = config.vocab_size // 2 if name == "chosen" else config.vocab_size  # so that it can learn
        columns[f"{name}_ids"] = [rng.integers(2, below, n).tolist() for n in tokens]
        columns[f"{name}_length"] = tokens.tolist()
    columns["common_length"] = [0] * len(lengths["prompt"])  # drawn at random
    Dataset.from_dict(columns).save_to_disk(scratch / "pairs")
    return {
        "machine": machine(),
        "torch": torch.__version__,
        "model": f"{job['model']}, {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size:,}, {model.num_parameters() / 1e6:,.0f} M parameters, {model.dtype}",
        "data": f"{job['pairs']} pairs of {job['lengths']} lengths divided by {scale_of(job)}, max_length "
        f"{max_length_of(job)}, micro-batches of {BATCH} pairs, {job['accumulation']} in a step",
    }


def model_config(job: dict):
    """The model's configuration, with its own features (windows, grouped queries, partial RoPE) at the job's size."""
    fields = json.loads((ROOT / "bench/shapes" / MODELS[job["model"]] / "config.json").read_text())
    fields.pop("layer_types", None)  # the model's own pattern fits only its number of layers
    fields |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "max_position_embeddings": 8192}
    fields["num_hidden_layers"] = 2 if job["quick"] else 6
    if DEVICE == "cuda":
        fields["num_hidden_layers"] = 8
    else:
        fields |= CPU_SHAPE
    if "sliding_window" in fields:
        fields["sliding_window"] = max(4, fields["sliding_window"] // scale_of(job))
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def machine() -> str:
    if DEVICE == "cuda":
        return torch.cuda.get_device_name()
    name = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{len(os.sched_getaffinity(0))}-core {name[1] if name else 'CPU'}"


class Stock(DPOTrainer):
    """TRL's trainer on the same token ids, without its tokenization."""

    def _prepare_dataset(self, dataset, *args):
        return dataset


class Curve(TrainerCallback):
    """Seconds since the beginning of the training, and the loss, of each step."""

    def on_train_begin(self, *args, **kwargs):
        self.start = time.perf_counter()
        self.points: list[tuple[float, float]] = []

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.points.append((time.perf_counter() - self.start, logs["loss"]))


def prepare_trainer(trainer: SFMDPOTrainer, asked: Asked, warm: int) -> float:
    """Chooses path and micro-batch and adds the reference's columns, as a start does; returns the seconds of the
    reference pass, without the first `warm` pairs."""
    tokens = trainer.train_dataset
    with base_model(trainer) as base:
        path, micro_batch, _ = calibrate(base, tokens, asked, NEW)
        first, _ = add_reference(base, path, Pairs({"train": tokens.select(range(warm))}, [], warm, []))
        rest = Pairs({"train": tokens.select(range(warm, len(tokens)))}, [], len(tokens) - warm, [])
        start = time.perf_counter()
        rest, _ = add_reference(base, path, rest)
        seconds = time.perf_counter() - start
    pairs = Pairs({"train": concatenate_datasets([first.train, rest.train])}, [], len(tokens), [])
    trainer.apply(RunFacts(path=path, micro_batch=micro_batch), pairs)
    return seconds if trainer.args.precompute_ref_log_probs else 0.0


def train(job: dict) -> dict:
    """Trains one variant for one epoch of the measured pairs, after a few warm-up batches."""
    warm = BATCH * job["accumulation"]  # an optimizer step to warm up
    trainer, reference_seconds = make_trainer(job, warm)
    trainer.remove_callback(PrinterCallback)
    curve = Curve()
    trainer.add_callback(curve)
    meter = Meter()
    flops = ForwardFlops.of(trainer.model)
    live_reference = not trainer.args.precompute_ref_log_probs
    collate = CountingCollator(trainer.data_collator, flops, live_reference, getattr(trainer, "path", None))

    def counting(examples):
        batch = collate(examples)
        meter.add(batch["counts"])
        return batch

    trainer.data_collator = counting
    pairs = trainer.train_dataset
    trainer.train_dataset = pairs.select(range(warm))
    trainer.train()
    meter.counts.clear()
    trainer.train_dataset = pairs.select(range(warm, len(pairs)))
    seconds = trainer.train().metrics["train_runtime"]
    logged = [entry.get("perf/peak_memory_gib", 0.0) for entry in trainer.state.log_history]
    peak = max(peak_memory_gib(), *logged)  # before the matrix products that follow
    counts = meter.counts
    assert counts["pairs"] == job["pairs"]
    peak_rate = peak_flops(machine())
    return {
        "variant": job["variant"],
        "seconds": seconds,
        "reference_seconds": reference_seconds,
        "pairs_per_second": counts["pairs"] / seconds,
        "epoch_pairs_per_second": counts["pairs"] / (seconds + reference_seconds),
        "tokens_per_second": counts["tokens"] / seconds,
        "padding_fraction": 1 - counts["computed"] / counts["grid"],
        "peak_memory_gib": peak,
        "mfu": counts["flops"] / seconds / matmul_rate(),
        **({"mfu_data_sheet": counts["flops"] / seconds / peak_rate} if peak_rate else {}),
        "flops": counts["flops"],
        "curve": [(reference_seconds + seconds, loss) for seconds, loss in curve.points],
        "loss": trainer.state.log_history[-1]["train_loss"],
        "memory_gib": getattr(trainer.args, "memory_gib", None),
    }


def make_trainer(job: dict, warm: int) -> tuple[DPOTrainer, float]:
    """The variant's trainer, and the seconds of its reference pass, without the first `warm` pairs. All settings but
    the flags are the same for all variants."""
    model = str(Path(job["scratch"]) / "model")
    variant = job["variant"]
    pairs = load_from_disk(str(Path(job["scratch"]) / "pairs"))
    common: dict[str, Any] = {"train_dataset": pairs, "processing_class": AutoTokenizer.from_pretrained(model)}
    settings: dict[str, Any] = {
        "output_dir": str(Path(job["home"]) / "run"),
        "max_length": max_length_of(job),
        "num_train_epochs": 1,
        "learning_rate": job["learning_rate"],
        "warmup_steps": 0,
        "beta": 5.0,
        "bf16": DEVICE == "cuda",
        "use_cpu": DEVICE == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    init_kwargs = {"dtype": str(DTYPE).removeprefix("torch."), "attn_implementation": "sdpa"}
    if variant not in SHIPPED:
        settings |= {"gradient_checkpointing": True, "per_device_train_batch_size": BATCH}
    if variant == "stock":
        settings |= {"loss_type": ["sigmoid_norm"], "gradient_accumulation_steps": job["accumulation"]}
        return Stock(model=model, args=DPOConfig(**settings, model_init_kwargs=init_kwargs), **common), 0.0
    settings |= {"model_name_or_path": model, "max_prompt_length": max_length_of(job) // 2, "dataset_num_proc": 1}
    settings |= {"dataset_name": "random ids", "global_batch_size": BATCH * job["accumulation"]}
    if variant in SHIPPED:
        settings["config"] = recipe_of(job)
    else:
        names = list(VARIANTS)
        for name in names[: names.index(variant) + 1]:
            settings |= VARIANTS[name]
    if variant == SHIPPED[1]:
        settings["memory_gib"] = job["stock_peak_gib"]
    config = parse_config([f"--{name}={value}" for name, value in settings.items()])
    config.train.model_init_kwargs = init_kwargs  # in the dtype of stock TRL, which no recipe could set on a GPU
    config = identify_models(config, {}, {})  # as a start does, before its reference pass
    asked = read_asked(config, load_model_config(config))
    trainer = SFMDPOTrainer(config, asked, **common)
    return trainer, prepare_trainer(trainer, asked, warm)


def matmul_rate() -> float:
    """FLOP/s of a large square matrix product, the peak for MFU."""
    n = 8192 if DEVICE == "cuda" else 1536
    factor = torch.randn(n, n, device=DEVICE, dtype=DTYPE)
    timer = torch.utils.benchmark.Timer("a @ a", globals={"a": factor}, num_threads=torch.get_num_threads())
    return 2 * n**3 / timer.blocked_autorange(min_run_time=1).median


def main(job: dict) -> None:
    try:
        result = {"prepare": prepare, "train": train}[job["job"]](job)
    except torch.OutOfMemoryError:
        result = {"variant": job["variant"], "error": "out of memory"}
    Path(job["home"], "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
