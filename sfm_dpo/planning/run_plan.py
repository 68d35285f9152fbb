"""Will it fit, and how long will it take? Memory, collectives, FLOPs, hours and disk of a recipe, before submission.

From the model's configuration and the lengths of the pairs alone: no weights are read, no GPU is needed. Memory comes
from memory.py, collectives from sharding.py, FLOPs from throughput.py. docs/plan.md has the reasoning.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import get_peft_model
from transformers import AutoConfig, PretrainedConfig
from trl import get_peft_config

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import Config
from sfm_dpo.data.token_lengths import Lengths, truncate
from sfm_dpo.model import memory
from sfm_dpo.model.flops import ForwardFlops, peak_flops
from sfm_dpo.model.loading import check_files
from sfm_dpo.model.sharding import checkpoint_bytes, collectives, hybrid_warning
from sfm_dpo.run.checkpoint import most_at_once

ROOT = Path(__file__).resolve().parents[2]


LAUNCHES = {"zero2": "ds_config.json", "zero3": "configs/accelerate/ds_zero3.json", "fsdp2": None}
# Bytes of memory, from the vendors' data sheets.
GPU_MEMORY = {"B300": 288e9, "B200": 180e9, "H200": 141e9, "H100": 80e9, "A100": 80e9, "L40S": 48e9}
USABLE = 0.9  # the rest: CUDA's context, NCCL, and what the allocator cannot join
# open-instruct's DPO of OLMo 2 7B on 16 H100, packed and compiled: the best published figure for DPO at this size
MFU = 0.225
DRAWN = 20_000  # pairs that stand for the data where only percentiles are known


@dataclass(frozen=True)
class Data:
    """Truncated lengths of pairs, and how many pairs of the training set each of them stands for."""

    cut: Lengths
    pairs: int

    @property
    def sequences(self) -> np.ndarray:
        return np.stack([self.cut.prompt + self.cut.chosen, self.cut.prompt + self.cut.rejected], axis=1)

    @property
    def share(self) -> float:
        return self.pairs / len(self.cut)

    def micro_batch(self, pairs: int, packed: bool) -> tuple[int, int]:
        """Computed tokens and response tokens of the largest micro-batch of so many pairs that can occur."""
        tokens = self.sequences.sum(axis=1)
        longest = np.argsort(tokens)[-pairs:]
        repeat = pairs / len(longest)  # fewer pairs than that in the data
        responses = int((self.cut.chosen + self.cut.rejected)[longest].sum() * repeat)
        computed = int(tokens[longest].sum() * repeat) if packed else 2 * pairs * int(self.sequences.max())
        return computed, min(responses, computed)


def read_lengths(path: Path) -> tuple[Lengths, int]:
    """Lengths drawn from percentiles, and the number of pairs they stand for.

    `path`: JSON of analyze_dataset.py, or {"pairs": N, "percentiles": {"prompt": {"50": 114, "95": 793, ...},
    "chosen": ..., "rejected": ...}}. Prompts and responses are drawn independently, between two percentiles on a log
    scale, with a fixed seed.

    Raises:
        UserError: the file is neither.
    """
    try:
        given = json.loads(path.read_text())
        pairs, percentiles, rng = int(given["pairs"]), given["percentiles"], np.random.default_rng(0)
        columns = []
        for name in ("prompt", "chosen", "rejected"):
            points = sorted(
                (float(q) / 100, value["tokens"] if isinstance(value, dict) else value)
                for q, value in percentiles[name].items()
                if q != "mean"
            )
            shares, tokens = zip(*points, strict=True)
            drawn = np.exp(np.interp(rng.random(DRAWN), shares, np.log(np.maximum(tokens, 1))))
            columns.append(drawn.round().astype(np.int64))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--lengths {path}: {type(error).__name__} {error}; give the JSON of analyze_dataset.py --json, or "
            '{"pairs": 1000, "percentiles": {"prompt": {"50": 100, "95": 800}, "chosen": {...}, "rejected": {...}}}'
        ) from error
    prompt, chosen, rejected = columns
    return Lengths(prompt, chosen, rejected, np.zeros(DRAWN, dtype=np.int64)), pairs


def load_shape(config: Config) -> PretrainedConfig:
    """The model's configuration. Raises UserError where neither folder nor Hub gives one."""
    name = config.model.model_name_or_path
    check_files(name, ["config.json"])
    try:
        return AutoConfig.from_pretrained(
            name, revision=config.model.model_revision, trust_remote_code=config.train.trust_remote_code
        )
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(
            f"model_name_or_path {name}: no config.json to be had; give a folder that holds one: {error}"
        ) from error


def make_plan(
    config: Config,
    shape: PretrainedConfig,
    lengths: Lengths,
    pairs: int,
    gpu: str,
    num_gpus: int,
    num_nodes: int,
    mfu: float = MFU,
) -> dict[str, Any]:
    """Everything that scripts/plan.py prints; bytes, tokens, FLOPs and hours.

    Args:
        lengths: of the pairs, not truncated; `pairs`: how many they stand for.
        gpu: a name in GPU_MEMORY, in any case.
        num_gpus: on each of `num_nodes`.

    Raises:
        UserError: an unknown GPU, or no pair is left at this max_length.
    """
    args, gpus = config.train, num_gpus * num_nodes
    name = next((known for known in GPU_MEMORY if known.lower() == gpu.lower()), None)
    if name is None:
        raise UserError(f"--gpu {gpu}: choose one of {', '.join(GPU_MEMORY).lower()}")
    keep, cut = truncate(lengths, args.max_length or int(lengths.total.max()) + 1, args.max_prompt_length)
    if not keep.any():
        raise UserError(f"max_length {args.max_length}: no prompt leaves room for a response; raise it")
    data = Data(cut, round(pairs * float(keep.mean())))
    model = memory.meta_model(shape)
    parameters = trained = sum(p.numel() for p in model.parameters())
    adapted = None
    if lora := get_peft_config(config.model):
        with torch.device("meta"):
            adapted = get_peft_model(memory.meta_model(shape), lora)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    per_device = config.micro_batch
    unit = per_device * gpus
    if args.global_batch_size % unit:
        raise UserError(
            f"global_batch_size {args.global_batch_size} is no multiple of per_device_train_batch_size {per_device} x "
            f"{gpus} GPUs; give other --num_gpus, --num_nodes or --per_device_train_batch_size"
        )
    micro_batches = args.global_batch_size // unit
    traced = {on: memory.activations(shape, torch.bfloat16, on) for on in (True, False)}
    per_rank = args.global_batch_size // gpus
    choices = [b for b in range(1, per_rank + 1) if per_rank % b == 0]

    def activation(batch: int, checkpointing: bool) -> int:
        tokens, responses = data.micro_batch(batch, args.padding_free)
        return traced[checkpointing](tokens, memory.head_bytes(shape, responses, torch.bfloat16, on_gpu=True))

    launches: dict[str, dict[str, Any]] = {}
    for launch, file in LAUNCHES.items():
        zero = json.loads((ROOT / file).read_text())["zero_optimization"] if file else {}
        largest, block = memory.largest_module(model), memory.largest_block(model)
        states = memory.model_states(trained, largest, block, launch, num_gpus, num_nodes, zero)
        if adapted:  # ZeRO-2 keeps frozen weights whole, FSDP2 splits them in fp32
            states["weights"] += int({"zero2": 2, "zero3": 2 / gpus, "fsdp2": 4 / gpus}[launch] * parameters)
        elif not args.precompute_ref_log_probs:
            states["reference"] = 2 * parameters // (gpus if launch == "zero3" else 1)
        held, free = sum(states.values()), GPU_MEMORY[name] * USABLE
        launches[launch] = {
            "states": states,
            "total": {on: held + activation(per_device, on) for on in (True, False)},
            "largest_per_device": {
                on: max((b for b in choices if held + activation(b, on) <= free), default=None) for on in (True, False)
            },
            "collectives": collectives(model, launch, micro_batches, args.gradient_checkpointing, zero),
            "warning": hybrid_warning(model, micro_batches, args.gradient_checkpointing, zero)
            if launch == "zero3"
            else None,
            "checkpoint": checkpoint_bytes(
                adapted or (memory.meta_model(shape, torch.float32) if launch == "fsdp2" else model),
                {"zero2": 2, "zero3": 3, "fsdp2": 0}[launch],
                launch == "fsdp2",
            ),
        }
    forward_flops = ForwardFlops.of(model)
    responses = int((cut.chosen + cut.rejected).sum())
    forward = forward_flops(torch.from_numpy(data.sequences.ravel()), responses) * data.share
    training = 3 * forward * args.num_train_epochs
    reference = forward * (1 if args.precompute_ref_log_probs else args.num_train_epochs)
    peak = peak_flops(name)
    assert peak is not None  # of each in GPU_MEMORY
    hours = {
        part: flops / (peak * gpus * mfu) / 3600 for part, flops in (("training", training), ("reference", reference))
    }
    kept = most_at_once(args)
    return {
        "model": {"model_type": shape.model_type, "parameters": parameters, "trained": trained},
        "gpu": {"name": name, "memory": GPU_MEMORY[name], "usable": USABLE, "num_gpus": num_gpus, "nodes": num_nodes},
        "data": {
            "pairs": data.pairs,
            "tokens": round(int(data.sequences.sum()) * data.share),
            "response_tokens": round(responses * data.share),
            "longest_sequence": int(data.sequences.max()),
        },
        "batch": {
            "global": args.global_batch_size,
            "per_device": per_device,
            "micro_batches": micro_batches,
            "steps": round(data.pairs * args.num_train_epochs / args.global_batch_size),
            "packed": args.padding_free,
            "largest_micro_batch": data.micro_batch(per_device, args.padding_free)[0],
            "checkpointing": args.gradient_checkpointing,
            "activations": {on: activation(per_device, on) for on in (True, False)},
            "activation_per_token": {on: traced[on].peak[1] for on in (True, False)},
        },
        "launches": launches,
        "time": {"flops": {"training": training, "reference": reference}, "mfu": mfu, "hours": hours},
        "disk": {launch: kept * facts["checkpoint"] for launch, facts in launches.items()} | {"kept": kept},
    }


def text(plan: dict[str, Any]) -> str:
    """The table for people; memory in GiB."""
    model, gpu, data, batch, time = (plan[key] for key in ("model", "gpu", "data", "batch", "time"))
    gpus = gpu["num_gpus"] * gpu["nodes"]
    usable = gpu["memory"] * gpu["usable"]
    launches = plan["launches"]

    def row(name: str, cells: list[Any]) -> str:
        return f"  {name:<42}" + "".join(f"{cell:>12}" for cell in cells)

    def size(values: list[float]) -> list[str]:
        return [f"{value / 2**30:.1f}" for value in values]

    on_off = (("with checkpointing", True), ("without", False))
    tokens = f"{batch['largest_micro_batch']:,} tokens {'packed' if batch['packed'] else 'padded'}"
    lines = [
        f"model     {model['model_type']}, {model['parameters']:,} parameters"
        + (f", {model['trained']:,} trained" if model["trained"] != model["parameters"] else ""),
        f"data      {data['pairs']:,} pairs, {data['tokens'] / 1e6:,.0f} M tokens "
        f"({data['response_tokens'] / 1e6:,.0f} M of responses), longest sequence {data['longest_sequence']:,}",
        f"batch     {batch['global']} = {batch['per_device']} x {batch['micro_batches']} accumulation x {gpus} GPUs, "
        f"{batch['steps']:,} steps; largest micro-batch {tokens}",
        f"memory    GiB on each of {gpus} {gpu['name']}, {usable / 2**30:.0f} of {gpu['memory'] / 2**30:.0f} counted "
        "as usable",
        row("", list(launches)),
    ]
    for part in next(iter(launches.values()))["states"]:
        lines.append(row(part, size([facts["states"][part] for facts in launches.values()])))
    for name, on in on_off:
        lines.append(row(f"activations {name}", size([batch["activations"][on]] * len(launches))))
    for name, on in on_off:
        lines.append(row(f"total {name}", size([facts["total"][on] for facts in launches.values()])))
    for name, on in on_off:
        largest = [facts["largest_per_device"][on] or "none" for facts in launches.values()]
        lines.append(row(f"largest per_device {name}", largest))
    for kind, name in (("all_gather", "gathers of weights a step"), ("reduce", "reductions of gradients a step")):
        lines.append(row(name, [f"{facts['collectives'][kind]:,}" for facts in launches.values()]))
    lines.append(row("a checkpoint, GB", [f"{facts['checkpoint'] / 1e9:.0f}" for facts in launches.values()]))
    kept = plan["disk"]["kept"]
    lines.append(row(f"disk for {kept} of them, GB", [f"{plan['disk'][launch] / 1e9:.0f}" for launch in launches]))
    flops, hours = time["flops"], time["hours"]
    total = sum(hours.values())
    lines.append(
        f"time      {flops['training']:.2e} FLOPs of training, {flops['reference']:.2e} of the reference; at "
        f"{time['mfu']:.1%} MFU {hours['training']:.1f} + {hours['reference']:.1f} = {total:.1f} hours, "
        f"{total * gpus:,.0f} GPU-hours"
    )
    for launch, facts in launches.items():
        as_asked = "fits" if facts["total"][batch["checkpointing"]] <= usable else "does not fit"
        off = facts["largest_per_device"][False]
        say = "yes" if facts["total"][False] <= usable else f"with per_device {off} at most" if off else "no"
        lines.append(f"{launch:<10}{as_asked} as asked; can checkpointing be off? {say}")
    lines += [f"warning   {facts['warning']}" for facts in launches.values() if facts["warning"]]
    if model["trained"] < model["parameters"]:
        lines.append("warning   LoRA: activations and time are those of full training, upper bounds")
    return "\n".join(lines)
