"""GPU check: CHECKS, each in its own processes, show whether training is correct and fast on this machine.

Comparisons use the recipe's model with few layers and random weights; memory and speed on a GPU use the full model.
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

import datasets
import numpy as np
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from sfm_dpo.common.distributed import CPU_ONLY, first_gpu, launch_file
from sfm_dpo.common.files import CALIBRATION, PROJECT, now, write_json
from sfm_dpo.config import parse_config
from sfm_dpo.config_short_run import short_run
from sfm_dpo.data.sampler import FIRST_STEPS_FOR
from sfm_dpo.data.tokenization import load_tokenizer
from sfm_dpo.model.attention import is_installed
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.run.files import TRAINER_STATE, read_file
from sfm_dpo.run.folder import DATA, ENVIRONMENT
from sfm_dpo.run.lock import Lease, check_owner, take_folder
from sfm_dpo.train.fit_memory import SIGNS

LAYERS = 4
PER_DEVICE = 2
TIMEOUT = 900  # seconds for each process
SPREAD = 4  # runs may differ by this many times the difference that another batch shape makes
ROUNDOFF = torch.finfo(torch.bfloat16).eps / 2  # or this many roundings: DeepSpeed's residual stream is 16 bit
MEMORY_TOLERANCE = 1.15  # measured over planned, or planned over measured
Result = tuple[bool | None, str]  # whether a check passed (None if it only measures), and what it found


class Skipped(Exception):
    """Raised if an earlier check has not left the files that this one needs."""


@dataclass
class Place:
    folder: Path
    recipe: list[str]  # the user's options of train_dpo.py
    processes: int
    on_gpu: bool
    # [2]: for the loss (absolute) and for the gradient norm (relative)
    tolerance: np.ndarray = field(default_factory=lambda: np.full(2, SPREAD * ROUNDOFF))
    calibration: dict[str, Any] = field(default_factory=dict)  # what has been measured

    @property
    def max_length(self) -> int:
        return 2048 if self.on_gpu else 96

    @property
    def max_steps(self) -> int:
        return 20 if self.on_gpu else 6

    def options(self, run: str, **other: Any) -> list[str]:
        """Options of train_dpo.py for a run in the folder `run`; a field that is None keeps the recipe's value."""
        fields: dict[str, Any] = {"dataset": self.folder / "pairs.jsonl", "dataset_num_proc": 1}
        fields |= {"model_name_or_path": self.folder / "model", "ref_model_name_or_path": "", "use_peft": False}
        fields |= {"checkpointed_layers": "", "use_cpu": not self.on_gpu, "bf16": True, "fp16": False}
        fields |= {"max_length": self.max_length, "max_prompt_length": self.max_length // 2, "overlong": "truncate"}
        fields |= {"global_batch_size": 2 * PER_DEVICE * self.processes, "per_device_train_batch_size": PER_DEVICE}
        fields["output_dir"] = self.folder / run
        # In a wide model, a large learning rate would amplify small differences
        fields |= {"max_steps": self.max_steps, "learning_rate": 1e-6, "logging_steps": 1, "save_strategy": "no"}
        fields |= {"flash_attention": "fa2", "preflight": "skip", "guard": "skip"}  # auto would read calibration.json
        return short_run(self.recipe, **(fields | other))

    def train(self, run: str, launch: str, **fields: Any) -> list[dict[str, Any]]:
        """Trains and returns the logged steps; launch is single, zero2, zero3 or fsdp2."""
        launcher = [sys.executable]
        if launch != "single":
            name = launch if self.on_gpu else {"zero2": "cpu"}.get(launch, f"cpu_{launch}")
            launcher += ["-m", "accelerate.commands.launch", "--config_file", launch_file(name)]
            launcher += ["--num_processes", str(self.processes), "--main_process_port", "0"]
        self.call(run, *launcher, "train_dpo.py", *self.options(run, **fields))
        gpus = read_file(self.folder / run / ENVIRONMENT)["gpus"]
        self.calibration["gpu"] = gpus[0] if gpus else "cpu"
        return self.steps(run)

    def steps(self, run: str) -> list[dict[str, Any]]:
        path = self.folder / run / TRAINER_STATE
        if not path.exists():
            raise Skipped(f"needs the run '{run}'")
        history = json.loads(path.read_text())["log_history"]
        return [entry for entry in history if "loss" in entry]

    def call(self, name: str, *command: str) -> None:
        """Runs a command with its output in NAME.log. If it fails, raises RuntimeError with its error line."""
        env = os.environ | {"HF_HOME": str(self.folder / "hf"), "HF_HUB_CACHE": constants.HF_HUB_CACHE}
        env["HF_DATASETS_CACHE"] = str(datasets.config.HF_DATASETS_CACHE)  # may have the recipe's
        if not self.on_gpu:
            env |= CPU_ONLY
        elif "single" in name:
            env["CUDA_VISIBLE_DEVICES"] = first_gpu()
        path = self.folder / f"{name}.log"
        with path.open("w") as log:  # timeout also ends the ranks
            words = ["timeout", "--signal=KILL", str(TIMEOUT), *command]
            done = subprocess.run(words, cwd=PROJECT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            text = path.read_text()
            errors = re.findall(r"^(?:error: |\w*(?:Error|Exception)\b).*", text, re.M) or [text[-300:]]
            raise RuntimeError(f"exit code {done.returncode}: {errors[0][:300]} ({path})")


def prepare(place: Place) -> Lease:
    """Writes the recipe's model with few layers and random weights, its tokenizer, and pairs of many lengths. Returns
    the folder's lease. Raises UserError if another job uses the folder."""
    config = parse_config(short_run(place.recipe), training=False)
    shape = load_model_config(config)
    tokenizer = load_tokenizer(config)
    check_owner(place.folder)
    shutil.rmtree(place.folder, ignore_errors=True)  # an error in the recipe leaves the last calibration
    place.folder.mkdir(parents=True)
    lease = take_folder(place.folder)
    text = shape.get_text_config()
    text.num_hidden_layers = min(LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    # 16 bit in the file, so that all launchers start with the same weights
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(place.folder / "model")
    tokenizer.save_pretrained(place.folder / "model")
    write_pairs(place.folder / "pairs.jsonl", 2 * PER_DEVICE * place.processes * place.max_steps, place.max_length)
    return lease


def write_pairs(path: Path, count: int, longest: int) -> None:
    """Writes `count` pairs; the lengths of the responses are log-uniform up to `longest` words."""
    rng = np.random.default_rng(0)

    def words(most: int) -> str:
        n = int(np.exp(rng.uniform(np.log(2), np.log(most))))
        return " ".join(f"w{i}" for i in rng.integers(500, size=n))

    limits = {"prompt": longest // 4, "chosen": longest, "rejected": longest}
    rows = [{part: words(limit) for part, limit in limits.items()} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_paths(place: Place) -> Result:
    """Compares log-probs and gradients of packed and shared rows by parity.py, which exits with 1 for a bug."""
    out = place.folder / "paths.json"
    options = ["--variants", "packed,packed+bf16,shared,shared+bf16", "--json", str(out)]
    try:
        place.call("paths-single", sys.executable, "scripts/parity.py", *options, *place.options("paths", bf16=False))
    except RuntimeError as error:
        if SIGNS.search(str(error)):
            raise Skipped(f"fp32 weights, gradients and padded scores do not fit: {error}") from error
        if not out.exists():
            raise
    rows = json.loads(out.read_text())["variants"]
    found = ", ".join(f"{row['variant']} {row['verdict']}" for row in rows)
    return all(row["verdict"] != "bug" for row in rows), found


def check_rounding(place: Place) -> Result:
    """Trains in one process with two batch shapes, which measures the rounding differences of this model."""
    place.train("single", "single")
    place.train("single-shape", "single", per_device_train_batch_size=1)
    rounding, text = compare(place, "single-shape")
    place.tolerance = SPREAD * np.maximum(ROUNDOFF, rounding)  # NaN if a step is NaN: then no comparison passes
    return None, f"another batch shape: {text}; allowed below: {place.tolerance[0]:.1e}, {place.tolerance[1]:.1%}"


def compare(place: Place, run: str, other: str = "single") -> tuple[np.ndarray, str]:
    """[2]: the largest differences of loss (absolute) and gradient norm (relative), or NaN; and both as text."""
    pairs = zip(place.steps(run), place.steps(other), strict=True)
    rows = [(abs(a["loss"] - b["loss"]), abs(a["grad_norm"] / b["grad_norm"] - 1)) for a, b in pairs]
    loss, norm = differences = np.max(rows, axis=0)
    return differences, f"loss within {loss:.1e}, gradient norm within {norm:.1%}"


def check_kernels(place: Place) -> Result:
    """Times each installed FlashAttention; `flash` is the fastest of those that train as FA2 does. Fails if one is
    installed and not usable: training would silently be slower."""
    times: dict[str, float] = {}
    texts = []
    unusable = False
    for kernel in ("FA2", "FA3", "FA4") if place.on_gpu else ("FA2",):
        run = f"single-{kernel}"
        out = place.folder / f"{run}.json"
        timing = ["bench/attention.py", str(place.folder / "model"), "--flash_attention", kernel.lower()]
        try:
            place.call(f"{run}-times", sys.executable, *timing, "--json", str(out))
            place.train(run, "single", flash_attention=kernel.lower())
        except RuntimeError as error:
            unusable |= kernel == "FA2" or is_installed(kernel)
            texts.append(f"{kernel}: {error}")
            continue
        forward, backward = json.loads(out.read_text())
        differences, text = compare(place, run)
        if (differences <= place.tolerance).all():
            times[kernel] = forward + backward
            place.calibration["flash"] = min(times, key=lambda name: times[name])
        else:
            unusable = True
            kernel += " (NOT USED)"
        texts.append(f"{kernel} forward {forward:.2f} ms, backward {backward:.2f} ms, {text}")
    return False if unusable else None, "; ".join(texts)


def check_launcher(place: Place, launch: str) -> Result:
    save = "steps" if launch == "zero2" else "no"
    place.train(launch, launch, save_strategy=save, save_steps=place.max_steps // 2)
    differences, text = compare(place, launch)
    return bool((differences <= place.tolerance).all()), f"{place.max_steps} steps against one process: {text}"


def check_resume(place: Place) -> Result:
    checkpoint = place.folder / "zero2" / f"checkpoint-{place.max_steps // 2}"
    if not checkpoint.exists():
        raise Skipped("needs the checkpoint of the check 'ZeRO-2'")
    place.train("resumed", "zero2", resume_from_checkpoint=checkpoint)
    differences, text = compare(place, "resumed", "zero2")
    if not place.on_gpu:
        return not differences.any(), f"{text}; must be bitwise"
    text += "; need not be bitwise, as FA2's backward is not deterministic"
    return bool((differences <= place.tolerance).all()), text


def check_memory(place: Place) -> Result:
    """The setting that memory decides, and its speed; on a GPU for the full model and the recipe's own pairs."""
    fields: dict[str, Any] = {"per_device_train_batch_size": ""}
    if place.on_gpu:
        fields |= dict.fromkeys(["max_length", "max_prompt_length", "model_name_or_path", "use_peft"])
        fields |= dict.fromkeys(["dataset", "dataset_num_proc", "overlong", "flash_attention", "checkpointed_layers"])
        fields["global_batch_size"] = 2 * max(FIRST_STEPS_FOR) * place.processes
        fields["max_samples"] = 4 * fields["global_batch_size"]
    steps = place.train("memory", "zero2", max_steps=4, **fields)
    planned = json.loads((place.folder / "memory" / DATA).read_text())["settings"]["memory"]["bytes"] / 2**30
    measured = max(step["perf/peak_memory_gib"] for step in steps)
    shutil.rmtree(place.folder / "memory")  # the complete model
    place.calibration["memory_ratio"] = measured / planned
    setting = re.findall("chosen by memory: (.*), of", (place.folder / "memory.log").read_text())[0]
    text = f"{setting}; {measured:.2f} GiB measured"
    if place.on_gpu:
        text += f", {max(step['perf/reserved_memory_gib'] for step in steps):.2f} reserved"
    text += f"; {fmean(step['perf/tokens_per_second'] for step in steps[1:]):,.0f} tokens/s on {place.processes}"
    if "perf/mfu" in steps[0]:
        place.calibration["mfu"] = fmean(step["perf/mfu"] for step in steps[1:])
        text += f", {place.calibration['mfu']:.1%} MFU"
    fits = 1 / MEMORY_TOLERANCE <= measured / planned <= MEMORY_TOLERANCE  # below, the choice would waste the rest
    return fits if place.on_gpu else None, text


CHECKS: dict[str, Callable[[Place], Result]] = {
    "packed and shared rows": check_paths,
    "rounding": check_rounding,
    "attention kernels": check_kernels,
    "ZeRO-2": partial(check_launcher, launch="zero2"),
    "FSDP2": partial(check_launcher, launch="fsdp2"),
    "ZeRO-3": partial(check_launcher, launch="zero3"),
    "resume": check_resume,
    "memory and speed": check_memory,
}


def run_checks(place: Place) -> list[dict[str, Any]]:
    """Runs CHECKS in order; prints each, and writes checks.json and calibration.json after it."""
    lease = prepare(place)
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
        if "gpu" in place.calibration:
            about = {"model": " ".join(place.recipe), "processes": place.processes, "time": now()}
            write_json(place.folder / CALIBRATION.name, place.calibration | about)
    lease.release()
    return rows
