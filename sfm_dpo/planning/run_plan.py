"""Plan of a run before submission, from its model's configuration and its pairs' lengths: memory, hours and disk."""

import json
import math
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from sfm_dpo.common.distributed import LAUNCHES
from sfm_dpo.common.errors import UserError, user_input
from sfm_dpo.common.files import format_table
from sfm_dpo.config.fields import Config
from sfm_dpo.data.lengths import Lengths
from sfm_dpo.memory.asked import read_asked
from sfm_dpo.memory.host import update_seconds
from sfm_dpo.memory.planner import Candidate, MemoryPlanner, measure_optimizer, memory_limit
from sfm_dpo.model.flops import ForwardFlops, peak_flops
from sfm_dpo.model.sharding import checkpoint_bytes, fit_buckets, zero_config
from sfm_dpo.run.checkpoint import peak_checkpoint_count

TIGHT = 0.95  # of the limit
# Bytes as reported by torch.cuda.mem_get_info, which a run reads. B300, GB200, GH200 and A100-40 are from torch's
# out-of-memory messages in public issues ("has a total capacity of 184.31 GiB")
GPU_MEMORY = {"B300": 287e9, "GB200": 197e9, "B200": 191e9, "H200": 150e9, "GH200": 101e9, "H100": 85e9}
GPU_MEMORY |= {"A100": 85e9, "A100-40": 42.2e9, "L40S": 47.7e9}
# Model FLOPs utilisation, measured on one H200 with 8 layers of OLMo 3 7B (bench/results); 12 layers of GPT-NeoX 6.9B
# under ZeRO-2 reached 0.44. Several GPUs have not been measured
MFU = 0.37


def read_lengths(path: Path) -> Lengths:
    """Lengths drawn from the percentiles in analyze_dataset.py's JSON. Prompts and responses are drawn independently,
    between two percentiles on a log scale, with a fixed seed."""
    rng = np.random.default_rng(0)
    columns = {}
    with user_input(f"--lengths {path}", "give the JSON of analyze_dataset.py --json"):
        content = json.loads(path.read_text())
        for name in ("prompt", "chosen", "rejected"):
            values = content["percentiles"][name]
            points = sorted((float(q) / 100, value) for q, value in values.items() if q != "mean")
            shares, tokens = np.maximum(points, [[0, 1]]).T  # at least 1 token
            drawn = rng.random(int(content["pairs"]))
            columns[name] = np.exp(np.interp(drawn, shares, np.log(tokens))).round().astype(np.int64)
    return Lengths(**columns)


class Planner:
    """The plan of a run on `gpus` GPUs of one kind, as many as the configuration was read for, from the lengths of its
    pairs, not truncated."""

    def __init__(self, config: Config, model_config: PretrainedConfig, lengths: Lengths, gpu: str, gpus: int):
        self.args = config.train
        self.gpu = gpu
        self.gpus = gpus
        batch = self.args.global_batch_size
        self.limit = memory_limit(GPU_MEMORY[gpu], self.args.memory_gib)
        limits = (self.args.max_length, self.args.max_prompt_length)
        truncated = lengths.truncate(*limits)
        used = lengths.find_unused(truncated.responses, *limits, self.args.overlong) == ""
        self.lengths = truncated.select(used)
        of_epoch = len(self.lengths) // batch
        if not of_epoch:
            raise UserError(f"global_batch_size {batch}: there are only {used.sum()} pairs to train on; lower it")
        self.steps = self.args.count_steps(len(self.lengths))
        self.epochs = self.steps / of_epoch
        asked = read_asked(config, model_config)
        path = (asked.can_pack, asked.can_share)
        self.memory = MemoryPlanner(config, model_config, asked, self.lengths, gpus, *path)

    def plan_launch(self, launch: str) -> dict[str, Any]:
        """Memory on each GPU and, for its optimizer, of the host; the requested setting or the one that a run chooses
        (the smallest if none fits); hours that updates on the host take; the size of a checkpoint."""
        self.memory.launch = launch
        is_offload = launch == "offload"
        trained = self.memory.adapter or self.memory.model
        states = self.memory.states(fit_buckets(zero_config(launch), trained))
        choice = self.memory.choose(self.limit, sum(states.values()))
        stage = {"zero2": 2, "zero3": 3, "offload": 2}.get(launch, 0)
        state = measure_optimizer(self.args, is_flat=stage > 0)
        possible = self.memory.list_candidates(sum(states.values()))
        return {
            "states": states,
            "host": self.memory.host_bytes() if is_offload else None,
            "host_hours": self.steps * update_seconds(self.memory.trained, self.gpus) / 3600 if is_offload else None,
            "fitting": next((candidate.options for candidate in possible if candidate.bytes <= self.limit), None),
            "choice": asdict(choice),
            "fits": "no" if choice.bytes > self.limit else "tight" if choice.bytes > TIGHT * self.limit else "yes",
            "checkpoint": checkpoint_bytes(trained, stage, launch == "fsdp2", state),
        }

    def count_flops(self) -> dict[str, float]:
        """Of training (three forwards per step) and of the reference's forwards."""
        sequences = self.lengths.sequences
        shared = np.zeros_like(sequences)
        shared[:, 1] = sequences.sum(axis=1) - self.lengths.computed(self.memory.prefix_sharing)
        responses = int(self.lengths.responses.sum())
        lengths = torch.from_numpy(sequences.ravel())
        policy, reference = (  # FLOPs of their forwards
            ForwardFlops.of(model)(lengths, responses, shared=torch.from_numpy(shared.ravel()))
            for model in (self.memory.model, self.memory.reference)
        )
        epochs = 1 if self.args.precompute_ref_log_probs else self.epochs  # of the reference
        return {"training": 3 * policy * self.epochs, "reference": reference * epochs}

    def plan(self, mfu: float = MFU) -> dict[str, Any]:
        """All values that scripts/plan.py prints, in bytes, tokens, FLOPs and hours."""
        memory = self.memory
        sequences = self.lengths.sequences
        model = {"type": memory.model_config.model_type, "parameters": memory.parameters, "trained": memory.trained}
        tokens = {"tokens": int(sequences.sum()), "longest_sequence": int(sequences.max())}
        flops = self.count_flops()
        launches = [launch for launch in LAUNCHES if launch != "fsdp2" or not memory.adapter]  # config/checks.py
        peak = (peak_flops(self.gpu) or math.nan) * self.gpus * 3600
        return {
            "model": model,
            "gpu": {"name": self.gpu, "limit": self.limit, "count": self.gpus},
            "data": {"pairs": len(self.lengths), **tokens},
            "batch": {"global": self.args.global_batch_size, "steps": self.steps},
            "launches": {launch: self.plan_launch(launch) for launch in launches},
            "time": {"flops": flops, "hours": sum(flops.values()) / peak / mfu, "mfu": mfu},
            "checkpoints": peak_checkpoint_count(self.args, len(self.lengths)),
        }


def format_plan(plan: dict[str, Any]) -> str:
    model = plan["model"]
    gpu = plan["gpu"]
    data = plan["data"]
    batch = plan["batch"]
    time = plan["time"]
    hours = f"{time['hours']:.1f}, {time['hours'] * gpu['count']:,.0f} GPU-hours"
    if time["hours"] < 1:
        hours = f"{time['hours']:.1g} ({60 * time['hours']:.1f} minutes)"
    parameters = f"{model['type']}, {model['parameters']:,} parameters"
    if model["trained"] < model["parameters"]:
        parameters += f", {model['trained']:,} trained (LoRA: activations and hours are upper bounds)"
    tokens = f"{data['tokens'] / 1e6:,.0f} M tokens, longest sequence {data['longest_sequence']:,}"
    summary = [
        ("model", parameters),
        ("data", f"{data['pairs']:,} pairs, {tokens}"),
        ("batch", f"{batch['global']} pairs, {batch['steps']:,} steps"),
        ("hours", f"{hours}, at {time['mfu']:.0%} MFU (--mfu; one H200: 0.37 to 0.44)"),
        ("memory", f"GiB on each of {gpu['count']} {gpu['name']}, {gpu['limit'] / 2**30:.0f} usable"),
    ]
    columns = [_format_launch(launch, plan["checkpoints"]) for launch in plan["launches"].values()]
    table = [(name, *(column[name] for column in columns)) for name in columns[0]]
    refused: dict[str, list[str]] = defaultdict(list)  # launches by remedy
    for name, launch in plan["launches"].items():
        if launch["fits"] == "no":
            refused[_find_remedy(name, plan["launches"])].append(name)
    remedies = [f"do not fit as configured: {', '.join(names)}; {remedy}" for remedy, names in refused.items()]
    return "\n".join([format_table(summary, indent=0), format_table(table, ["", *plan["launches"]], "lr"), *remedies])


def _find_remedy(name: str, launches: dict[str, Any]) -> str:
    """What to change where a launch does not fit: its setting, or else the launch, or else the run."""
    for other in (name, *launches):
        if options := launches[other]["fitting"]:
            return f"LAUNCH={other} fits with {options}"
    return "use more GPUs (--num_gpus), a shorter max_length or LoRA (use_peft: true)"


def _format_launch(launch: dict[str, Any], checkpoints: int) -> dict[str, str]:
    setting = Candidate(**launch["choice"])
    return {
        **{name: f"{size / 2**30:.1f}" for name, size in launch["states"].items()},
        "total with activations": f"{setting.bytes / 2**30:.1f}",
        "fits": launch["fits"],
        "host memory": f"{launch['host'] / 2**30:.1f}" if launch["host"] else "-",
        "hours of updates on the host": f"{launch['host_hours']:.1f}" if launch["host"] else "-",
        "pairs per device": str(setting.per_device),
        "layers checkpointed": setting.share,
        "largest micro-batch, tokens": f"{setting.tokens:,}",
        f"disk for {checkpoints} checkpoints, GB": f"{checkpoints * launch['checkpoint'] / 1e9:.0f}",
    }
