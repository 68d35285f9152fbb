"""One job of throughput.py, in a process of its own: makes model and pairs, or trains one variant and measures it."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets, load_from_disk
from throughput import SHAPES, SHIPPED, VARIANTS, WARM_UP_BATCHES, recipe_of
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

from sfm_dpo.config import TrainConfig, parse_config
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.train.fit_memory import fit_memory
from sfm_dpo.train.throughput import CountingCollator, Meter, peak_memory_gib
from sfm_dpo.train.trainer import SFMDPOTrainer

# Tokens at these quantiles, linear in log(tokens) between. Think: median and p95 of prompt, chosen and rejected are
# those of allenai/Dolci-Think-DPO-7B; the others are fitted, with the correlation, to its totals (prompt + longer
# response): median 2,138 (here 2,158), p90 9,194 (9,696), p95 15,433 (15,068), within 4,096 75.1% (74.5%), within
# 8,192 87.7% (87.3%); and to what padding to the longest of 4 pairs costs, 2.5 times the real tokens (2.49).
# Instruct is fitted to the totals of allenai/Dolci-Instruct-DPO: median 682 (661), p95 3,521 (3,597), within 4,096
# 96.2% (96.2%). Chat is multi-turn, as sets of helpfulness are: means of prompt 149, chosen 42, rejected 52; 15% of
# the prompts are longer than 256.
QUANTILES = (0, 0.25, 0.5, 0.75, 0.87, 0.95, 0.99, 1)
PROMPT = (10, 34, 114, 333, 545, 793, 1700, 6000)
LENGTHS = {
    "think": {
        "prompt": PROMPT,
        "chosen": (60, 700, 1864, 2800, 6000, 11903, 22000, 32000),
        "rejected": (30, 300, 1154, 1600, 4600, 9518, 20000, 32000),
    },
    "instruct": {
        "prompt": PROMPT,
        "chosen": (4, 85, 270, 700, 1270, 2200, 4800, 10000),
        "rejected": (4, 75, 240, 650, 1200, 2100, 4800, 10000),
    },
    "chat": {
        "prompt": (6, 50, 120, 208, 265, 400, 660, 1100),
        "chosen": (1, 12, 28, 57, 81, 130, 215, 420),
        "rejected": (1, 15, 35, 71, 101, 160, 265, 500),
    },
}
CORRELATION = 0.75  # of the normal scores of chosen and rejected length
MAX_LENGTH = {"think": 8192, "instruct": 4096, "chat": 1024}


def sample_lengths(kind: str, n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """[n] tokens each of prompt, chosen and rejected. Sobol points: a small sample has the shape of the whole set."""
    points = torch.quasirandom.SobolEngine(3, scramble=True, seed=seed).draw(n, dtype=torch.float64)
    normal = torch.special.ndtri(points.clamp(1e-6, 1 - 1e-6))
    normal[:, 2] = CORRELATION * normal[:, 1] + (1 - CORRELATION**2) ** 0.5 * normal[:, 2]
    order = np.random.default_rng(seed).permutation(n)
    lengths = {}
    for i, (name, tokens) in enumerate(LENGTHS[kind].items()):
        u = torch.special.ndtr(normal[:, i]).numpy()[order]
        lengths[name] = np.exp(np.interp(u, QUANTILES, np.log(tokens))).astype(int)
    return lengths


def device_of(job: dict) -> str:
    return job["device"] or ("cuda" if torch.cuda.is_available() else "cpu")


def scale_of(job: dict) -> int:
    return job["scale"] or (8 if device_of(job) == "cpu" and job["lengths"] != "chat" else 1)


def max_length_of(job: dict) -> int:
    return MAX_LENGTH[job["lengths"]] // scale_of(job)


# ---- prepare


def prepare(job: dict) -> dict:
    """Writes model and pairs into the scratch folder, and facts.json, which the result repeats."""
    scratch, device, scale = Path(job["scratch"]), device_of(job), scale_of(job)
    config = model_config(job)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(scratch / "model")
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, config.vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(scratch / "model")

    lengths = sample_lengths(job["lengths"], job["pairs"] + warm_up_pairs(job))
    lengths = {name: np.maximum(2, tokens // scale) for name, tokens in lengths.items()}
    lengths["prompt"] = np.minimum(lengths["prompt"], max_length_of(job) // 2)  # as the recipes' max_prompt_length
    rng = np.random.default_rng(1)
    columns: dict = {}
    for name, tokens in lengths.items():
        columns[f"{name}_ids"] = [rng.integers(2, config.vocab_size, n).tolist() for n in tokens]
        columns[f"{name}_length"] = tokens.tolist()
    Dataset.from_dict(columns).save_to_disk(scratch / "pairs")
    shape = SHAPES[device][job["model"]]
    facts = {
        "machine": machine(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": f"{job['model']}, {config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"vocabulary {config.vocab_size:,}, {model.num_parameters() / 1e6:,.0f} M parameters",
        "shape": dict(zip(("hidden", "mlp", "layers", "heads", "vocabulary"), shape, strict=True)),
        "pairs": job["pairs"],
        "data": f"divided by {scale}, max_length {max_length_of(job)}, micro-batches of {job['batch']} pairs, "
        f"{job['accumulation']} in a step",
    }
    (scratch / "facts.json").write_text(json.dumps(facts))
    return {}


def model_config(job: dict):
    """The architecture's own features (windows, grouped queries, partial RoPE) at the size asked for."""
    if job["shape"]:
        return AutoConfig.from_pretrained(job["shape"])
    device = device_of(job)
    hidden, mlp, layers, heads, vocabulary = SHAPES[device][job["model"]]
    if job["quick"]:
        hidden, mlp, layers, heads, vocabulary = 32, 48, 2, 4, 64
    yarn = {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    specific = {
        "olmo3": {
            "sliding_window": max(4, 4096 // scale_of(job)),
            "rope_parameters": {"full_attention": yarn, "sliding_attention": plain},
        },
        "llama": {"num_key_value_heads": heads // 4},
        "gpt_neox": {},
        "olmo_hybrid": {},
    }
    return AutoConfig.for_model(
        job["model"],
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=job["layers"] or layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=max(8192, max_length_of(job)),
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=False,
        **specific[job["model"]],
    )


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{len(os.sched_getaffinity(0))}-core {name}"


def warm_up_pairs(job: dict) -> int:
    return max(WARM_UP_BATCHES, job["accumulation"]) * job["batch"]  # a whole optimizer step at least


# ---- train


class Stock(DPOTrainer):
    """TRL's trainer on the same token ids: it would tokenise text."""

    reference_seconds = reference_cpu_seconds = 0.0

    def _prepare_dataset(self, dataset, *args):
        return dataset


class Ours(SFMDPOTrainer):
    """This project's trainer, with a clock on the reference pass over the measured pairs."""

    reference_seconds = reference_cpu_seconds = 0.0
    warm_up = 0

    def _precompute_ref_logps(self, dataset, name, batch_size):
        rows = [range(self.warm_up), range(self.warm_up, len(dataset))]
        warm = super()._precompute_ref_logps(dataset.select(rows[0]), name, batch_size)
        start, cpu_start = time.perf_counter(), time.process_time()
        measured = super()._precompute_ref_logps(dataset.select(rows[1]), name, batch_size)
        self.reference_seconds = time.perf_counter() - start
        self.reference_cpu_seconds = time.process_time() - cpu_start
        return concatenate_datasets([warm, measured])


class Clock(TrainerCallback):
    """Seconds of the training loop."""

    def on_train_begin(self, *args, **kwargs):
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_train_end(self, *args, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
        self.cpu_seconds = time.process_time() - self.cpu_start


def train(job: dict) -> dict:
    """Trains one variant for one epoch of the measured pairs, after a few batches of others."""
    trainer = make_trainer(job)
    trainer.remove_callback(PrinterCallback)
    packed, sharing = trainer.args.padding_free, getattr(trainer, "prefix_sharing", False)
    meter, flops = Meter(), ForwardFlops.of(trainer.model)
    live_reference = not trainer.args.precompute_ref_log_probs
    collate = CountingCollator(trainer.data_collator, flops, live_reference, packed, sharing)

    def counting(examples):
        batch = collate(examples)
        meter.add(batch["counts"])
        return batch

    trainer.data_collator = counting
    clock = Clock()
    trainer.add_callback(clock)
    pairs, warm = trainer.train_dataset, warm_up_pairs(job)
    trainer.train_dataset = pairs.select(range(warm))
    trainer.train()
    warm_up_seconds = clock.seconds
    meter.counts = dict.fromkeys(meter.counts, 0.0)
    trainer.train_dataset = pairs.select(range(warm, len(pairs)))
    trainer.train()
    peak = peak_memory_gib()
    counts, seconds = meter.counts, clock.seconds
    assert counts["pairs"] == job["pairs"]
    rate = matmul_rate(device_of(job), trainer.model.dtype)
    return {
        "variant": job["variant"],
        "seconds": seconds,
        "cpu_seconds": clock.cpu_seconds,
        "reference_seconds": trainer.reference_seconds,
        "reference_cpu_seconds": trainer.reference_cpu_seconds,
        "warm_up_seconds": warm_up_seconds,
        "pairs_per_second": counts["pairs"] / seconds,
        "epoch_pairs_per_second": counts["pairs"] / (seconds + trainer.reference_seconds),
        "tokens_per_second": counts["tokens"] / seconds,
        "padding_fraction": 1 - counts["computed"] / counts["grid"],
        "peak_memory_gib": peak,
        "mfu": counts["flops"] / seconds / rate,
        "matmul_flops_per_second": rate,
        "flops": counts["flops"],
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],  # with torch_compile; more than the kinds of
        # layer, forward and backward, are recompilations
        "loss": trainer.state.log_history[-1]["train_loss"],
        "setting": trainer.setting,
    }


def make_trainer(job: dict) -> DPOTrainer:
    """The variant's trainer. What is not a flag is the same for all."""
    scratch, device, variant = Path(job["scratch"]), device_of(job), job["variant"]
    pairs = load_from_disk(str(scratch / "pairs"))
    settings: dict[str, Any] = {
        "output_dir": str(Path(job["home"]) / "run"),
        "max_length": max_length_of(job),
        "num_train_epochs": 1,
        "learning_rate": 1e-6,
        "beta": 5.0,
        "bf16": device == "cuda",
        "use_cpu": device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    batch = job["batch"] * job["accumulation"]
    if variant in SHIPPED:
        limit = job["stock_peak_gib"] if variant == SHIPPED[1] else job["memory_gib"]
        settings |= {"global_batch_size": batch, "model_name_or_path": scratch / "model"}
        settings |= {"max_prompt_length": max_length_of(job) // 2, "dataset_num_proc": 1}
        settings |= {"memory_gib": limit} if limit else {}
        config = parse_config([f"--{name}={value}" for name, value in ({"config": recipe_of(job)} | settings).items()])
        args, trainer_class = config.train, Ours
        if args.fit_memory:
            fit_memory(config, pairs, AutoConfig.from_pretrained(scratch / "model"), {})
    else:
        names = list(VARIANTS)
        settings |= {"loss_type": ["sigmoid_norm"], "gradient_checkpointing": True}
        settings |= {"per_device_train_batch_size": job["batch"], "gradient_accumulation_steps": job["accumulation"]}
        for name in names[: names.index(variant) + 1]:
            settings |= VARIANTS[name]
        if variant == "stock":
            args, trainer_class = DPOConfig(**settings), Stock
        else:
            args, trainer_class = TrainConfig(**settings, global_batch_size=batch), Ours
    # bf16 weights, as DeepSpeed's engine holds them
    dtype = "bfloat16" if device == "cuda" else "float32"
    args.model_init_kwargs = {"dtype": dtype, "attn_implementation": "sdpa"}
    Ours.warm_up = warm_up_pairs(job)
    trainer = trainer_class(
        model=str(scratch / "model"),
        args=args,
        train_dataset=pairs,
        processing_class=AutoTokenizer.from_pretrained(scratch / "model"),
    )
    trainer.setting = {
        "per_device": args.per_device_train_batch_size,
        "gradient_checkpointing": args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}),
        "memory_gib": getattr(args, "memory_gib", None),
    }
    return trainer


def matmul_rate(device: str, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP/s of a large square matrix product, median of repetitions: what MFU is a share of."""
    n = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / float(np.median(times[2:]))


def main(job: dict) -> None:
    try:
        result = {"prepare": prepare, "train": train}[job["job"]](job)
    except torch.OutOfMemoryError:
        result = {"variant": job["variant"], "error": "out of memory"}
    Path(job["home"], "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
