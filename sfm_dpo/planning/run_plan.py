"""Plan of a run before submission: memory, batch sizes, collectives, FLOPs, hours and disk.

From the model's configuration and the lengths of the pairs alone: no weights are read, no GPU is needed. docs/plan.md
explains how each figure is made.
"""

import copy
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from transformers import PretrainedConfig
from trl import get_peft_config

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT
from sfm_dpo.common.gpus import GPU_MEMORY
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import Config
from sfm_dpo.data.sampler import PairSampler
from sfm_dpo.data.token_lengths import Lengths
from sfm_dpo.health.guard_rules import COLLAPSE_STEPS
from sfm_dpo.model.flops import PEAK_FLOPS, ForwardFlops
from sfm_dpo.model.memory import USABLE, meta_model, model_states
from sfm_dpo.model.packing import why_not_shared
from sfm_dpo.model.sharding import checkpoint_bytes, collectives, hybrid_warning
from sfm_dpo.run.checkpoint import most_at_once
from sfm_dpo.train.fit_memory import (
    EVERY_N_LAYERS,
    ActivationModel,
    Setting,
    checkpointed_layers,
    choose_setting,
    list_settings,
)

log = logging.getLogger(__name__)

LAUNCHES = {"zero2": "ds_config.json", "zero3": "configs/accelerate/ds_zero3.json", "fsdp2": None}
# Published model FLOPs utilisation of DPO at 7B, all of open-instruct on H100: what hours are computed at where this
# cluster has no figure of its own.
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
            mfu, ratio = float(measured["mfu"]), float(measured["memory_ratio"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--calibration {path}: {type(error).__name__} {error}; give the calibration.json of "
                "check_gpu.sh, or remove the file"
            ) from error
        return replace(self, mfu={mfu: f"measured on {gpu}: {path}"}, memory_ratio=ratio)


def zero_config(launch: str) -> dict[str, Any]:
    """`zero_optimization` of a launcher's DeepSpeed file; empty for FSDP2."""
    file = LAUNCHES[launch]
    return json.loads((PROJECT / file).read_text())["zero_optimization"] if file else {}


def find_gpu(text: str) -> str | None:
    """The name in GPU_MEMORY that torch's name of a GPU or Slurm's type of one holds, if any."""
    return next((name for name in GPU_MEMORY if name in text.upper()), None)


def read_lengths(path: Path) -> tuple[Lengths, int]:
    """Lengths drawn from percentiles, and the number of pairs they stand for.

    `path`: JSON of analyze_dataset.py, or {"pairs": N, "percentiles": {"prompt": {"50": 114, "95": 793, ...},
    "chosen": ..., "rejected": ...}}. Prompts and responses are drawn independently, between two percentiles on a log
    scale, with a fixed seed.

    Raises:
        UserError: the file is neither.
    """
    try:
        content = json.loads(path.read_text())
        pairs, rng, columns = int(content["pairs"]), np.random.default_rng(0), {}
        for name in ("prompt", "chosen", "rejected"):
            points = sorted(
                (float(q) / 100, value["tokens"] if isinstance(value, dict) else value)
                for q, value in content["percentiles"][name].items()
                if q != "mean"
            )
            shares, tokens = zip(*points, strict=True)
            columns[f"{name}_length"] = np.exp(
                np.interp(rng.random(DRAWN), shares, np.log(np.maximum(tokens, 1)))
            ).round()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--lengths {path}: {type(error).__name__} {error}; give the JSON of analyze_dataset.py --json, or "
            '{"pairs": 1000, "percentiles": {"prompt": {"50": 100, "95": 800}, "chosen": {...}, "rejected": {...}}}'
        ) from error
    return Lengths.from_columns(columns), pairs


class Planner:
    """The figures of a run on a cluster.

    Args:
        shape: the model's configuration.
        lengths: of the pairs, not truncated; `pairs`: how many they stand for.

    Raises:
        UserError: no pair is left at this max_length, or the GPUs do not divide the global batch.
    """

    def __init__(self, config: Config, shape: PretrainedConfig, lengths: Lengths, pairs: int, cluster: Cluster):
        self.config, self.args, self.shape, self.cluster = config, config.train, shape, cluster
        if self.args.global_batch_size % (config.micro_batch * cluster.gpus):
            raise UserError(
                f"global_batch_size {self.args.global_batch_size} is no multiple of per_device_train_batch_size "
                f"{config.micro_batch} x "
                f"{cluster.gpus} GPUs; give other --num_gpus, --num_nodes or --per_device_train_batch_size"
            )
        self.whole, self.whole_pairs = lengths, pairs
        self._truncate(self.args.max_length, self.args.max_prompt_length)
        self.model = meta_model(shape)
        self.adapter = None
        if lora := get_peft_config(config.model):
            with torch.device("meta"):
                self.adapter = get_peft_model(meta_model(shape), lora)
        self.parameters = self.model.num_parameters()
        self.trained = (self.adapter or self.model).num_parameters(only_trainable=True)
        cannot = why_not_shared(self.model, self.args.padding_free, self.args.router_aux_loss_coef)
        self.prefix_sharing = not cannot and self.args.prefix_sharing is not False
        self.activations = ActivationModel(shape, torch.bfloat16, on_gpu=True)

    def truncated(self, max_length: int, max_prompt_length: int | None) -> "Planner":
        """The plan of the same run with pairs cut at other lengths; in a second or two, for nothing is traced again.

        Raises:
            UserError: no pair is left at this max_length.
        """
        other = copy.copy(self)
        other.__dict__.pop("settings", None)
        other._truncate(max_length, max_prompt_length)
        return other

    def _truncate(self, max_length: int | None, max_prompt_length: int | None) -> None:
        cut = self.whole.truncate(max_length, max_prompt_length)
        if not cut.trainable.any():
            raise UserError(f"max_length {max_length}: no prompt leaves room for a response; raise it")
        self.lengths = cut.select(cut.trainable)
        self.pairs = round(self.whole_pairs * float(cut.trainable.mean()))
        self.scale = self.pairs / len(self.lengths)  # pairs of the training set that each of the lengths stands for

    @cached_property
    def settings(self) -> list[Setting]:
        """Every number of pairs on a device with every number of checkpointed layers; bytes of the activations.

        Lengths that stand for more pairs are repeated, and fewer than a global batch until they fill one.
        """
        args, gpus, lengths = self.args, self.cluster.gpus, self.lengths
        lengths = lengths.select(np.arange(max(self.pairs, args.global_batch_size)) % len(lengths))
        tokens, seed = lengths.computed(self.prefix_sharing), args.seed if args.data_seed is None else args.data_seed
        batch, per_rank = args.global_batch_size, args.global_batch_size // gpus
        return list_settings(
            PairSampler(tokens, args.train_sampling_strategy, batch, 1, seed, args.padding_free),
            lengths,
            gpus,
            self.activations,
            epochs=math.ceil(args.num_train_epochs),
            forwards=3 + (not args.precompute_ref_log_probs),
            sizes=[n for n in range(1, per_rank + 1) if per_rank % n == 0],
            every_n_layers={*EVERY_N_LAYERS, checkpointed_layers(args)},
        )

    def states(self, launch: str) -> dict[str, int]:
        """Bytes on each GPU of weights, gradients, optimizer and buffers under zero2, zero3 or fsdp2."""
        live = not self.adapter and not self.args.precompute_ref_log_probs
        return model_states(self.model, self.trained, launch, self.cluster.gpus, zero_config(launch), live)

    def fit(self, launch: str) -> Setting | None:
        """What is asked for or fit_memory chooses, with the bytes of a process; None where nothing fits."""
        states, ratio = sum(self.states(launch).values()), self.cluster.memory_ratio
        settings = [replace(setting, bytes=round(ratio * (states + setting.bytes))) for setting in self.settings]
        try:
            return choose_setting(settings, GPU_MEMORY[self.cluster.gpu] * USABLE, self.config)
        except UserError:
            return None

    @property
    def setting(self) -> Setting:
        """Of ZeRO-2; where nothing fits, what is asked for, and of what is left open what needs least."""
        return self.fit("zero2") or choose_setting(self.settings[::-1], math.inf, self.config)

    def plan_launch(self, launch: str) -> dict[str, Any]:
        """Memory on each GPU, collectives of a step and size of a checkpoint under zero2, zero3 or fsdp2."""
        fsdp, setting, choice = launch == "fsdp2", self.setting, self.fit(launch)
        states, ratio = self.states(launch), self.cluster.memory_ratio
        held = {
            (setting.per_device, setting.every_n_layers): round(ratio * (sum(states.values()) + setting.bytes))
            for setting in self.settings
        }
        usable = GPU_MEMORY[self.cluster.gpu] * USABLE
        fitting = [key for key, size in held.items() if size <= usable]
        saved = self.adapter or (meta_model(self.shape, torch.float32) if fsdp else self.model)
        step = (self.micro_batches, setting.every_n_layers > 0, zero_config(launch))
        return {
            "states": states,
            "total": {on: held[setting.per_device, int(on)] for on in (True, False)},
            "largest_per_device": {
                on: max((size for size, every in fitting if every == on), default=None) for on in (True, False)
            },
            "choice": choice and asdict(choice),
            "collectives": collectives(self.model, launch, *step),
            "warning": hybrid_warning(self.model, *step) if launch == "zero3" else None,
            "checkpoint": checkpoint_bytes(saved, {"zero2": 2, "zero3": 3, "fsdp2": 0}[launch], fsdp),
        }

    @property
    def micro_batches(self) -> int:
        """Of a rank in a step."""
        return self.args.global_batch_size // self.cluster.gpus // self.setting.per_device

    def plan_time(self) -> dict[str, Any]:
        """FLOPs of training (three forwards a step) and of the reference's forwards, and hours at each efficiency."""
        sequences, responses = self.lengths.sequences, int(self.lengths.responses.sum())
        saved = np.zeros_like(sequences)
        saved[:, 1] = sequences.sum(axis=1) - self.lengths.computed(self.prefix_sharing)
        tokens, shared = (torch.from_numpy(array.ravel()) for array in (sequences, saved))
        forward = ForwardFlops.of(self.model)(tokens, responses, shared=shared) * self.scale
        epochs = self.args.num_train_epochs
        flops = {
            "training": 3 * forward * epochs,
            "reference": forward * (1 if self.args.precompute_ref_log_probs else epochs),
        }
        peak = PEAK_FLOPS[self.cluster.gpu] * self.cluster.gpus * 3600
        hours = [
            {"mfu": mfu, "source": source} | {part: n / peak / mfu for part, n in flops.items()}
            for mfu, source in self.cluster.mfu.items()
        ]
        return {"flops": flops, "hours": hours}

    def plan(self) -> dict[str, Any]:
        """Everything that scripts/plan.py prints; bytes, tokens, FLOPs and hours."""
        args, cluster, lengths, setting = self.args, self.cluster, self.lengths, self.setting
        launches = {launch: self.plan_launch(launch) for launch in LAUNCHES}
        checkpoints = most_at_once(args, COLLAPSE_STEPS)
        return {
            "model": {"model_type": self.shape.model_type, "parameters": self.parameters, "trained": self.trained},
            "gpu": {
                "name": cluster.gpu,
                "memory": GPU_MEMORY[cluster.gpu],
                "usable": USABLE,
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
                "per_device": setting.per_device,
                "micro_batches": self.micro_batches,
                "steps": round(self.pairs * args.num_train_epochs / args.global_batch_size),
                "packed": args.padding_free,
                "chosen": bool(self.config.fitted),
                "largest_micro_batch": setting.tokens,
                "every_n_layers": setting.every_n_layers,
                "activations": {
                    bool(s.every_n_layers): s.bytes
                    for s in self.settings
                    if s.every_n_layers < 2 and s.per_device == setting.per_device
                },
            },
            "launches": launches,
            "time": self.plan_time(),
            "disk": {launch: checkpoints * facts["checkpoint"] for launch, facts in launches.items()}
            | {"kept": checkpoints},
        }


def bound_memory(config: Config, shape: PretrainedConfig, cluster: Cluster, launch: str) -> str:
    """One line: whether a run fits, before any pair is read: from every response empty to every sequence full."""
    length = config.train.max_length or 0
    full = Lengths(*(np.full(1, tokens) for tokens in (0, length, length, 0)))
    planner = Planner(config, shape, full, config.train.global_batch_size, cluster)
    least = cluster.memory_ratio * sum(planner.states(launch).values()) / 2**30
    usable = GPU_MEMORY[cluster.gpu] * USABLE / 2**30
    of = f"GiB of {usable:.0f} usable on each of {cluster.gpus} {cluster.gpu} under {launch} (computed)"
    if least > usable:
        return (
            f"memory: does not fit: weights, gradients and optimizer alone take {least:.1f} {of}; take more GPUs, or "
            "LAUNCH=zero3 or fsdp2"
        )
    if setting := planner.fit(launch):
        return f"memory: fits, at most {setting.bytes / 2**30:.1f} {of}"
    return f"memory: {least:.1f} {of} before the first pair; scripts/plan.py knows more by the lengths of the pairs"


def format_choice(choice: dict[str, Any] | None, chosen: bool) -> dict[str, str]:
    """Whether what is asked for fits; where fit_memory chooses, its choice."""
    if not chosen:
        return {"fits as asked": "yes" if choice else "no"}
    names = ("pairs per device", "layers checkpointed", "total")
    values = ["none", "none", "none"]
    if choice:
        setting = Setting(**choice)
        values = [str(setting.per_device), setting.layers, f"{setting.bytes / 2**30:.1f}"]
    return {f"fit_memory: {name}": value for name, value in zip(names, values, strict=True)}


def format_plan(plan: dict[str, Any]) -> str:
    """The plan as text; memory in GiB."""
    model, gpu, data, batch, time = (plan[key] for key in ("model", "gpu", "data", "batch", "time"))
    flops, checkpoints, ratio = time["flops"], plan["disk"]["kept"], gpu["memory_ratio"]
    gpus, usable = gpu["num_gpus"] * gpu["nodes"], gpu["memory"] * gpu["usable"]
    lora = model["trained"] < model["parameters"]
    summary = {
        "model": f"{model['model_type']}, {model['parameters']:,} parameters"
        + (f", {model['trained']:,} trained" if lora else ""),
        "data": f"{data['pairs']:,} pairs, {data['tokens'] / 1e6:,.0f} M tokens "
        f"({data['response_tokens'] / 1e6:,.0f} M of responses), longest sequence {data['longest_sequence']:,}",
        "batch": f"{batch['global']} = {batch['per_device']} x {batch['micro_batches']} accumulation x {gpus} GPUs, "
        f"{batch['steps']:,} steps; largest micro-batch {batch['largest_micro_batch']:,} tokens "
        + ("packed" if batch["packed"] else "padded"),
        "memory": f"GiB on each of {gpus} {gpu['name']}, {usable / 2**30:.0f} of {gpu['memory'] / 2**30:.0f} counted "
        "as usable" + (f"; totals are {ratio:.2f} times their parts, as measured" if ratio != 1 else ""),
    }
    columns = {}
    for launch, facts in plan["launches"].items():
        sizes = facts["states"] | {
            f"{name} {'with checkpointing' if on else 'without'}": values[on]
            for name, values in (("activations", batch["activations"]), ("total", facts["total"]))
            for on in (True, False)
        }
        columns[launch] = {name: f"{size / 2**30:.1f}" for name, size in sizes.items()} | {
            "largest per_device with checkpointing": facts["largest_per_device"][True] or "none",
            "largest per_device without": facts["largest_per_device"][False] or "none",
            **format_choice(facts["choice"], batch["chosen"]),
            "gathers of weights a step": f"{facts['collectives']['all_gather']:,}",
            "reductions of gradients a step": f"{facts['collectives']['reduce']:,}",
            "a checkpoint, GB": f"{facts['checkpoint'] / 1e9:.0f}",
            f"disk for {checkpoints} of them, GB": f"{plan['disk'][launch] / 1e9:.0f}",
        }
    flops_text = f"{flops['training']:.2e} FLOPs of training, {flops['reference']:.2e} of the reference"
    durations = [
        (f"{hours:.1f}", f"{hours * gpus:,.0f}", f"{entry['mfu']:.2%}", entry["source"])
        for entry in time["hours"]
        for hours in (entry["training"] + entry["reference"],)
    ]
    notes = [("warning", facts["warning"]) for facts in plan["launches"].values() if facts["warning"]]
    if data["pairs"] < batch["global"]:
        notes.append(("warning", f"{data['pairs']:,} pairs are less than global_batch_size: nothing could be trained"))
    if lora:
        notes.append(("warning", "LoRA: activations and time are those of full training, upper bounds"))
    table = [(name, *(cells[name] for cells in columns.values())) for name in columns["zero2"]]
    return "\n".join(
        (
            format_table(summary.items(), indent=0),
            format_table(table, ["", *columns], "lr"),
            format_table([("time", flops_text), *notes], indent=0),
            format_table(durations, ["hours", "GPU-hours", "MFU", "of"], "rrrl"),
        )
    )
