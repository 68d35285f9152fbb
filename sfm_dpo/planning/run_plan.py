"""Plan of a run before submission: memory, batch sizes, FLOPs, hours and disk.

From the model's configuration and the lengths of the pairs alone: no weights are read, no GPU is needed. docs/plan.md
explains how each number is made.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig
from trl.trainer.utils import get_peak_flops

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.gpus import GPU_MEMORY
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import Config
from sfm_dpo.data.micro_batches import list_micro_batches
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.health.guard_rules import COLLAPSE_STEPS
from sfm_dpo.model.flops import ForwardFlops
from sfm_dpo.model.memory import meta_model
from sfm_dpo.model.memory_plan import (
    MemoryPlanner,
    Setting,
    add_states,
    choose_setting,
    find_gpu,
    memory_limit,
)
from sfm_dpo.model.sharding import LAUNCHES, checkpoint_bytes, hybrid_warning, zero_config
from sfm_dpo.run.checkpoint import peak_checkpoint_count

log = logging.getLogger(__name__)

# Published model FLOPs utilisation of DPO at 7B, all of open-instruct on H100: what hours are computed at where this
# cluster has no measurement of its own.
PUBLISHED_MFU = {
    0.225: "OLMo 2 7B, 16 GPUs, OLMo-core, packed and compiled; of the last step alone (open-instruct #1466)",
    0.0856: "OLMo 3 7B, 32 GPUs, OLMo-core, packed, 16k, steady (open-instruct #1827)",
    0.0277: "the same with DeepSpeed ZeRO-3, packed (open-instruct #1827)",
}
DRAWN = 20_000  # pairs that stand for the data where only percentiles are known


@dataclass(frozen=True)
class Cluster:
    """`num_gpus` GPUs on each of `num_nodes` nodes.

    Attributes:
        mfu: each model FLOPs utilisation that hours are computed at, with its source.
        memory_ratio: measured over planned memory.

    Raises:
        UserError: `gpu` is not in GPU_MEMORY.
    """

    gpu: str
    num_gpus: int
    num_nodes: int = 1
    mfu: Mapping[float, str] = field(default_factory=PUBLISHED_MFU.copy)
    memory_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.gpu not in GPU_MEMORY:
            raise UserError(f"--gpu {self.gpu.lower()}: choose one of {', '.join(GPU_MEMORY).lower()}")

    @property
    def gpus(self) -> int:
        return self.num_gpus * self.num_nodes

    def calibrated(self, path: Path) -> "Cluster":
        """With the efficiency and the memory that check_gpu.sh measured; unchanged where that was on another GPU.

        Raises:
            UserError: the file is no calibration.
        """
        try:
            measured = json.loads(path.read_text())
            gpu = str(measured["gpu"])
            if find_gpu(gpu) != self.gpu:
                log.warning(f"{path}: measured on {gpu}, not on {self.gpu}; not used")
                return self
            mfu = {float(measured["mfu"]): f"measured on {gpu}: {path}"}
            return replace(self, mfu=mfu, memory_ratio=float(measured["memory_ratio"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--calibration {path}: {type(error).__name__} {error}; give the calibration.json of "
                "check_gpu.sh, or remove the file"
            ) from error


def read_lengths(path: Path) -> tuple[Lengths, int]:
    """Lengths drawn from percentiles, and the number of pairs they stand for.

    `path`: JSON of analyze_dataset.py, or {"pairs": N, "percentiles": {"prompt": {"50": 114, "95": 793, ...},
    "chosen": ..., "rejected": ...}}. Prompts and responses are drawn independently, between two percentiles on a log
    scale, with a fixed seed.

    Raises:
        UserError: the file is neither.
    """
    rng = np.random.default_rng(0)
    columns = {}
    try:
        content = json.loads(path.read_text())
        pairs = int(content["pairs"])
        for name in ("prompt", "chosen", "rejected"):
            points = {}
            for percentile, value in content["percentiles"][name].items():
                if percentile != "mean":
                    points[float(percentile) / 100] = value["tokens"] if isinstance(value, dict) else value
            shares = sorted(points)
            tokens = np.maximum([points[share] for share in shares], 1)
            columns[f"{name}_length"] = np.exp(np.interp(rng.random(DRAWN), shares, np.log(tokens))).round()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--lengths {path}: {type(error).__name__} {error}; give the JSON of analyze_dataset.py --json, or "
            '{"pairs": 1000, "percentiles": {"prompt": {"50": 100, "95": 800}, "chosen": {...}, "rejected": {...}}}'
        ) from error
    return Lengths.from_columns(columns), pairs


class Planner:
    """The plan of a run on a cluster.

    Args:
        shape: the model's configuration.
        lengths: of the pairs, not truncated; `pairs`: how many they stand for.

    Raises:
        UserError: no pair is left at this max_length, or the GPUs do not divide the global batch.
    """

    def __init__(self, config: Config, shape: PretrainedConfig, lengths: Lengths, pairs: int, cluster: Cluster):
        self.config, self.args, self.cluster = config, config.train, cluster
        if self.args.global_batch_size % (config.micro_batch * cluster.gpus):
            raise UserError(
                f"global_batch_size {self.args.global_batch_size} is no multiple of per_device_train_batch_size "
                f"{config.micro_batch} x {cluster.gpus} GPUs; give other --num_gpus, --num_nodes or "
                "--per_device_train_batch_size"
            )
        self.memory = MemoryPlanner(config, shape, cluster.gpus)
        self.limit = memory_limit(GPU_MEMORY[cluster.gpu], self.args.memory_gib)
        cut = lengths.truncate(self.args.max_length, self.args.max_prompt_length)
        if not cut.trainable.any():
            raise UserError(f"max_length {self.args.max_length}: no prompt leaves room for a response; raise it")
        self.lengths = cut.select(cut.trainable)
        self.pairs = round(pairs * float(cut.trainable.mean()))
        self.scale = self.pairs / len(self.lengths)  # pairs of the training set that each of the lengths stands for
        # Lengths that stand for more pairs are repeated, and fewer than a global batch until they fill one
        rows = np.arange(max(self.pairs, self.args.global_batch_size)) % len(self.lengths)
        micro_batches = list_micro_batches(
            self.config, self.lengths.select(rows), self.memory.prefix_sharing, self.cluster.gpus
        )
        self.settings = self.memory.list_settings(micro_batches)

    def choose(self, launch: str) -> Setting:
        """What is asked for, or what fit_memory chooses; where nothing fits, what needs least memory."""
        states = sum(self.memory.states(launch, zero_config(launch)).values())
        return choose_setting(add_states(self.settings, states, self.cluster.memory_ratio), self.limit, self.config)

    def plan_launch(self, launch: str) -> dict[str, Any]:
        """Setting, memory on each GPU and size of a checkpoint under zero2, zero3 or fsdp2."""
        choice = self.choose(launch)
        saved = self.memory.adapter or self.memory.model
        if launch == "fsdp2" and not self.memory.adapter:
            saved = meta_model(self.memory.shape, torch.float32)
        return {
            "states": self.memory.states(launch, zero_config(launch)),
            "choice": asdict(choice),
            "fits": choice.bytes <= self.limit,
            "warning": hybrid_warning(self.memory.shape) if launch == "zero3" else None,
            "checkpoint": checkpoint_bytes(saved, {"zero2": 2, "zero3": 3}.get(launch, 0), launch == "fsdp2"),
        }

    def plan_time(self) -> dict[str, Any]:
        """FLOPs of training (three forwards a step) and of the reference's forwards, and hours at each efficiency."""
        sequences = self.lengths.sequences
        shared = np.zeros_like(sequences)
        shared[:, 1] = sequences.sum(axis=1) - self.lengths.computed(self.memory.prefix_sharing)
        count_flops = ForwardFlops.of(self.memory.model)
        responses = int(self.lengths.responses.sum())
        forward = self.scale * count_flops(
            torch.from_numpy(sequences.ravel()), responses, shared=torch.from_numpy(shared.ravel())
        )
        epochs = self.args.num_train_epochs
        flops = {
            "training": 3 * forward * epochs,
            "reference": forward * (1 if self.args.precompute_ref_log_probs else epochs),
        }
        peak = get_peak_flops(self.cluster.gpu, "bfloat16") * self.cluster.gpus * 3600
        hours = []
        for mfu, source in self.cluster.mfu.items():
            hours.append({"mfu": mfu, "source": source} | {part: n / peak / mfu for part, n in flops.items()})
        return {"flops": flops, "hours": hours}

    def plan(self) -> dict[str, Any]:
        """Everything that scripts/plan.py prints; bytes, tokens, FLOPs and hours."""
        args, cluster, lengths = self.args, self.cluster, self.lengths
        return {
            "model": {
                "model_type": self.memory.shape.model_type,
                "parameters": self.memory.parameters,
                "trained": self.memory.trained,
            },
            "gpu": {
                "name": cluster.gpu,
                "memory": GPU_MEMORY[cluster.gpu],
                "limit": self.limit,
                "memory_ratio": cluster.memory_ratio,
                "num_gpus": cluster.num_gpus,
                "nodes": cluster.num_nodes,
            },
            "data": {
                "pairs": self.pairs,
                "tokens": round(int(lengths.sequences.sum()) * self.scale),
                "response_tokens": round(int(lengths.responses.sum()) * self.scale),
                "longest_sequence": int(lengths.sequences.max()),
            },
            "batch": {
                "global": args.global_batch_size,
                "steps": round(self.pairs * args.num_train_epochs / args.global_batch_size),
                "packed": args.padding_free,
                "chosen": bool(self.config.fitted),
            },
            "launches": {launch: self.plan_launch(launch) for launch in LAUNCHES},
            "time": self.plan_time(),
            "checkpoints": peak_checkpoint_count(args, COLLAPSE_STEPS),
        }


def format_plan(plan: dict[str, Any]) -> str:
    """The plan as text; memory in GiB."""
    model, gpu, data, batch = plan["model"], plan["gpu"], plan["data"], plan["batch"]
    gpus = gpu["num_gpus"] * gpu["nodes"]
    lora = model["trained"] < model["parameters"]
    summary = {
        "model": f"{model['model_type']}, {model['parameters']:,} parameters",
        "data": f"{data['pairs']:,} pairs, {data['tokens'] / 1e6:,.0f} M tokens "
        f"({data['response_tokens'] / 1e6:,.0f} M of responses), longest sequence {data['longest_sequence']:,}",
        "batch": f"{batch['global']} pairs, {batch['steps']:,} steps, {'packed' if batch['packed'] else 'padded'}",
        "memory": f"GiB on each of {gpus} {gpu['name']}, {gpu['limit'] / 2**30:.0f} of {gpu['memory'] / 2**30:.0f} "
        "counted as usable",
    }
    if lora:
        summary["model"] += f", {model['trained']:,} trained"
    if gpu["memory_ratio"] != 1:
        summary["memory"] += f"; totals are {gpu['memory_ratio']:.2f} times their parts, as measured"
    columns = [_format_launch(facts, plan["checkpoints"]) for facts in plan["launches"].values()]
    table = [(name, *(column[name] for column in columns)) for name in columns[0]]
    flops = plan["time"]["flops"]
    notes = [("time", f"{flops['training']:.2e} FLOPs of training, {flops['reference']:.2e} of the reference")]
    notes += [("warning", facts["warning"]) for facts in plan["launches"].values() if facts["warning"]]
    if data["pairs"] < batch["global"]:
        notes.append(("warning", f"{data['pairs']:,} pairs are less than global_batch_size: nothing could be trained"))
    if lora:
        notes.append(("warning", "LoRA: activations and time are those of full training, upper bounds"))
    durations = []
    for entry in plan["time"]["hours"]:
        hours = entry["training"] + entry["reference"]
        durations.append((f"{hours:.1f}", f"{hours * gpus:,.0f}", f"{entry['mfu']:.2%}", entry["source"]))
    return "\n".join(
        (
            format_table(summary.items(), indent=0),
            format_table(table, ["", *plan["launches"]], "lr"),
            format_table(notes, indent=0),
            format_table(durations, ["hours", "GPU-hours", "MFU", "of"], "rrrl"),
        )
    )


def _format_launch(facts: dict[str, Any], checkpoints: int) -> dict[str, str]:
    setting = Setting(**facts["choice"])
    return {
        **{name: f"{size / 2**30:.1f}" for name, size in facts["states"].items()},
        "total with activations": f"{setting.bytes / 2**30:.1f}",
        "fits": "yes" if facts["fits"] else "no",
        "pairs per device": str(setting.per_device),
        "layers checkpointed": setting.layers,
        "largest micro-batch, tokens": f"{setting.tokens:,}",
        "a checkpoint, GB": f"{facts['checkpoint'] / 1e9:.0f}",
        f"disk for {checkpoints} of them, GB": f"{checkpoints * facts['checkpoint'] / 1e9:.0f}",
    }
