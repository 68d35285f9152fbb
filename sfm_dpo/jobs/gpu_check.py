"""GPU check: CHECKS, each in processes of its own, show whether everything is right and fast on this machine.

Comparisons use the recipe's model with few layers and random weights; memory and speed on a GPU the complete model.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from sfm_dpo.common.files import CALIBRATION, PROJECT, now, write_json
from sfm_dpo.config import parse_config
from sfm_dpo.data.sampler import FIRST_STEPS_FOR
from sfm_dpo.data.tokenization import load_tokenizer
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.run.folder import DATA

LAYERS = 4
STEPS = 6
PER_DEVICE = 2
TIMEOUT = 600  # seconds for each process
LOSS_TOLERANCE = 0.05  # as compare_runs.py where a run is in bf16
NORM_TOLERANCE = 0.1  # relative, of the gradient norm
MEMORY_TOLERANCE = 1.15  # measured over planned
Result = tuple[bool | None, str]  # whether a check passed (None where it only measures), and what it found


class Skipped(Exception):
    """An earlier check has not left what this one needs."""


@dataclass
class Place:
    folder: Path
    recipe: list[str]  # the user's options of train_dpo.py
    processes: int
    on_gpu: bool
    facts: dict[str, Any] = field(default_factory=dict)  # what a check leaves for later ones

    @property
    def max_length(self) -> int:
        return 2048 if self.on_gpu else 96

    def options(self, run: str, **other: Any) -> list[str]:
        """Options of train_dpo.py for a run in the folder `run`; a field that is None is the recipe's."""
        fields: dict[str, Any] = {"dataset_num_proc": 1, "report_to": "none"}
        fields |= {"model_name_or_path": self.folder / "model", "dataset_name": self.folder / "pairs.jsonl"}
        fields |= {"output_dir": self.folder / run, "use_cpu": not self.on_gpu, "bf16": True}
        fields |= {"max_length": self.max_length, "max_prompt_length": self.max_length // 2}
        fields |= {"global_batch_size": 2 * PER_DEVICE * self.processes, "per_device_train_batch_size": PER_DEVICE}
        fields |= {"max_steps": STEPS, "learning_rate": 1e-4, "logging_steps": 1, "save_strategy": "no"}
        fields |= {"preflight": "skip", "guard": "skip", "use_peft": False, "push_to_hub": False}
        given = {name: value for name, value in (fields | other).items() if value is not None}
        return [*self.recipe, *(f"--{name}={value}" for name, value in given.items())]

    def train(self, run: str, launch: str, **fields: Any) -> list[dict[str, Any]]:
        """Trains and returns the logged steps; launch is single, zero2, zero3 or fsdp2."""
        launcher = [sys.executable]
        if launch != "single":
            name = launch if self.on_gpu else {"zero2": "cpu"}.get(launch, f"cpu_{launch}")
            file = "accelerate_config.yaml" if name == "zero2" else f"configs/accelerate/{name}.yaml"
            launcher += ["-m", "accelerate.commands.launch", "--config_file", file]
            launcher += ["--num_processes", str(self.processes), "--main_process_port", "0"]
        self.call(run, *launcher, "train_dpo.py", *self.options(run, **fields))
        return self.steps(run)

    def steps(self, run: str) -> list[dict[str, Any]]:
        history = json.loads((self.folder / run / "trainer_state.json").read_text())["log_history"]
        return [entry for entry in history if "loss" in entry]

    def call(self, name: str, *command: str) -> None:
        """Runs a command; its output is in NAME.log. Raises RuntimeError with the line of its error where it fails."""
        env = os.environ | {"HF_HOME": str(self.folder / "hf"), "HF_HUB_CACHE": constants.HF_HUB_CACHE}
        if not self.on_gpu:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        elif "single" in name:
            env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        path = self.folder / f"{name}.log"
        with path.open("w") as log:  # timeout ends the ranks, too
            words = ["timeout", "--signal=KILL", str(TIMEOUT), *command]
            done = subprocess.run(words, cwd=PROJECT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            text = path.read_text()
            errors = re.findall(r"^(?:error: |\w*(?:Error|Exception)\b).*", text, re.M) or [text[-300:]]
            raise RuntimeError(f"exit code {done.returncode}: {errors[0][:300]} ({path})")


def prepare(place: Place) -> None:
    """Writes the recipe's model with few layers and random weights, its tokenizer, and pairs of many lengths."""
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    config = parse_config([*place.recipe, "--report_to", "none"], training=False)
    shape = load_model_config(config)
    text = shape.get_text_config()
    text.num_hidden_layers = min(LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    # 16 bit in the file: then all launchers begin with the same weights
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(place.folder / "model")
    load_tokenizer(config).save_pretrained(place.folder / "model")
    write_pairs(place.folder / "pairs.jsonl", 2 * PER_DEVICE * place.processes * STEPS, place.max_length)
    place.facts["max_length"] = config.train.max_length


def write_pairs(path: Path, count: int, longest: int) -> None:
    """`count` pairs whose responses have up to `longest` words, as many of each order of magnitude."""
    rng = np.random.default_rng(0)

    def words(most: int) -> str:
        n = int(np.exp(rng.uniform(np.log(2), np.log(most))))
        return " ".join(f"w{i}" for i in rng.integers(500, size=n))

    limits = {"prompt": longest // 4, "chosen": longest, "rejected": longest}
    rows = [{part: words(limit) for part, limit in limits.items()} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_paths(place: Place) -> Result:
    """Log-probs and gradients of packed and shared rows, by parity.py, which exits with 1 where one is a bug."""
    out = place.folder / "paths.json"
    options = ["--variants", "packed,packed+bf16,shared,shared+bf16", "--json", str(out)]
    try:
        place.call("paths-single", sys.executable, "scripts/parity.py", *options, *place.options("paths", bf16=False))
    except RuntimeError:
        if not out.exists():
            raise
    rows = json.loads(out.read_text())["variants"]
    found = ", ".join(f"{row['variant']} {row['verdict']}" for row in rows)
    return all(row["verdict"] != "bug" for row in rows), found


def check_kernels(place: Place) -> Result:
    """One process trains with each FlashAttention that is installed: loss against FA2's, and speed after warm-up."""
    first = place.train("single", "single", flash_attention="fa2" if place.on_gpu else None)
    place.facts["single"] = first
    speeds = {"FA2": mean_speed(first)}
    texts = []
    for kernel in ("FA3", "FA4") if place.on_gpu else ():
        try:
            steps = place.train(f"single-{kernel}", "single", flash_attention=kernel.lower())
        except RuntimeError as error:  # its package is not installed, or has no kernel for this GPU
            texts.append(f"{kernel}: {error}")
            continue
        apart = largest_difference(steps, first)
        if not apart <= LOSS_TOLERANCE:  # NaN is no smaller
            return False, f"{kernel}: loss differs from FA2's by {apart:.1e}"
        speeds[kernel] = mean_speed(steps)
    place.facts["flash"] = max(speeds, key=lambda kernel: speeds[kernel])
    return None, "; ".join([f"{kernel} {speed:,.0f} tokens/s" for kernel, speed in speeds.items()] + texts)


def mean_speed(steps: list[dict[str, Any]]) -> float:
    return fmean(step["perf/tokens_per_second"] for step in steps[1:])


def largest_difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    return float(np.max([abs(one["loss"] - other["loss"]) for one, other in zip(a, b, strict=True)]))  # NaN wins


def check_launcher(place: Place, launch: str) -> Result:
    if "single" not in place.facts:
        raise Skipped("needs the steps of the check 'attention kernels'")
    alone = place.facts["single"]
    steps = place.train(launch, launch, save_strategy="steps" if launch == "zero2" else "no", save_steps=STEPS // 2)
    loss = largest_difference(steps, alone)
    norm = np.max([abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(steps, alone, strict=True)])
    text = f"{STEPS} steps against one process: loss within {loss:.1e}, gradient norm within {norm:.1%}"
    return bool(loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE), text


def check_resume(place: Place) -> Result:
    checkpoint = place.folder / "zero2" / f"checkpoint-{STEPS // 2}"
    if not checkpoint.exists():
        raise Skipped("needs the checkpoint of the check 'ZeRO-2'")
    resumed = place.train("resumed", "zero2", resume_from_checkpoint=checkpoint)
    apart = largest_difference(resumed, place.steps("zero2"))
    return apart <= LOSS_TOLERANCE, f"loss within {apart:.1e}"


def check_memory(place: Place) -> Result:
    """What fit_memory chooses; writes calibration.json, which plan.py and `flash_attention: auto` read."""
    fields: dict[str, Any] = {"fit_memory": True, "per_device_train_batch_size": None}
    if place.on_gpu:
        fields |= dict.fromkeys(["max_length", "max_prompt_length", "model_name_or_path", "use_peft"])
        fields["global_batch_size"] = 2 * max(FIRST_STEPS_FOR) * place.processes
        fields["dataset_name"] = place.folder / "long.jsonl"
        write_pairs(fields["dataset_name"], 4 * fields["global_batch_size"], place.facts["max_length"])
    steps = place.train("memory", "zero2", max_steps=4, **fields)
    planned = json.loads((place.folder / "memory" / DATA).read_text())["fit_memory"]["bytes"] / 2**30
    measured = max(step["perf/peak_memory_gib"] for step in steps)
    shutil.rmtree(place.folder / "memory")  # the complete model
    setting = re.findall("fit_memory: (.*), of", (place.folder / "memory.log").read_text())[0]
    text = f"{setting}; {measured:.2f} GiB measured; {mean_speed(steps):,.0f} tokens/s on {place.processes}"
    mfu = fmean(step["perf/mfu"] for step in steps[1:]) if "perf/mfu" in steps[0] else None
    if mfu:
        text += f", {mfu:.1%} MFU"
    facts = {"gpu": torch.cuda.get_device_name() if place.on_gpu else "cpu", "processes": place.processes}
    facts |= {"mfu": mfu, "memory_ratio": measured / planned, "flash": place.facts.get("flash")}
    write_json(place.folder / CALIBRATION.name, facts | {"model": " ".join(place.recipe), "time": now()})
    return measured <= MEMORY_TOLERANCE * planned if place.on_gpu else None, text


CHECKS: dict[str, Callable[[Place], Result]] = {
    "packed and shared rows": check_paths,
    "attention kernels": check_kernels,
    "ZeRO-2": partial(check_launcher, launch="zero2"),
    "FSDP2": partial(check_launcher, launch="fsdp2"),
    "ZeRO-3": partial(check_launcher, launch="zero3"),
    "resume": check_resume,
    "memory and speed": check_memory,
}


def run_checks(place: Place) -> list[dict[str, Any]]:
    """Runs CHECKS in order; prints each and writes checks.json after it."""
    prepare(place)
    rows: list[dict[str, Any]] = []
    for name, check in CHECKS.items():
        start = time.monotonic()
        try:
            passed, text = check(place)
            result = {True: "pass", False: "FAIL", None: "measured"}[passed]
        except Skipped as reason:
            result = "skipped"
            text = str(reason)
        except Exception as error:  # whatever it is, the other checks say more
            result = "FAIL"
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        seconds = round(time.monotonic() - start)
        rows.append({"check": name, "result": result, "found": text, "seconds": seconds})
        print(f"{result:<8}  {name:<22}  {seconds:>4} s  {text}", flush=True)
        write_json(place.folder / "checks.json", rows)
    return rows
