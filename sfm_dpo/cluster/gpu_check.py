"""GPU check: real runs show whether training is correct here, with few layers, and what the full model needs."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from sfm_dpo.calibration.choose_path import GRADIENT
from sfm_dpo.common.distributed import CPU_ONLY, first_gpu, launch_file
from sfm_dpo.common.files import PROJECT, write_json
from sfm_dpo.common.statistics import ALLOWED, LOGP_ROUNDING
from sfm_dpo.config.effects import short_run
from sfm_dpo.config.fields import Config, parse_config
from sfm_dpo.data.sampler import FIRST_STEPS_FOR
from sfm_dpo.data.tokenization import load_tokenizer
from sfm_dpo.model.loading import count_positions, load_model_config
from sfm_dpo.run.facts import RunFacts
from sfm_dpo.run.folder import DATA, TRAINER_STATE, read_file
from sfm_dpo.run.lock import take_folder
from sfm_dpo.run.model_files import finish_model
from sfm_dpo.run.reader import describe_calibration

LAYERS = 4
PER_DEVICE = 2
BETA = 5
TIMEOUT = 900  # seconds for each run
# Fields of the model with few layers. In a wide model, a large learning rate would amplify small differences
SMALL_MODEL = {"loss_type": "sigmoid_norm", "loss_weights": "", "beta": BETA, "learning_rate": 1e-6, "bf16": True}
SMALL_MODEL |= {"use_peft": False, "ref_model_name_or_path": "", "overlong": "truncate"}
SMALL_MODEL |= {"per_device_train_batch_size": PER_DEVICE, "checkpointed_layers": "", "flash_attention": "fa2"}
SMALL_MODEL |= {"max_length": 2048, "max_prompt_length": 1024}
LAUNCHES = {"single": "single", "ZeRO-2": "zero2", "FSDP2": "fsdp2", "ZeRO-3": "zero3", "offload": "offload"}
LAUNCHES |= {"resumed": "zero2"}


@dataclass
class GpuCheck:
    folder: Path
    recipe: list[str]  # the user's options of train_dpo.py
    processes: int
    on_gpu: bool

    def __post_init__(self) -> None:
        self.max_steps = 20 if self.on_gpu else 6
        self.batch = 2 * PER_DEVICE * self.processes  # pairs

    def options(self, run: str, full_model: bool = False, **other: Any) -> list[str]:
        fields: dict[str, Any] = {"output_dir": self.folder / run, "max_steps": self.max_steps, "logging_steps": 1}
        fields |= {"global_batch_size": self.batch, "max_samples": self.batch * self.max_steps, "save_strategy": "no"}
        fields |= {"preflight": "skip", "guard": "skip", "use_cpu": not self.on_gpu}
        if not full_model:
            fields |= SMALL_MODEL | {"model_name_or_path": self.folder / "model"}
        return short_run(self.recipe, **(fields | other))

    def train(self, run: str, launch: str, **other: Any) -> str:
        """Trains in the folder `run`; returns what its calibration has found."""
        launcher = []
        if launch != "single":
            name = launch if self.on_gpu else {"zero2": "cpu"}.get(launch, f"cpu_{launch}")
            launcher = ["-m", "accelerate.commands.launch", "--config_file", launch_file(name)]
            launcher += ["--num_processes", str(self.processes), "--main_process_port", "0"]
        self.call(run, sys.executable, *launcher, "train_dpo.py", *self.options(run, **other))
        calibration = RunFacts.of(read_file(self.folder / run / DATA)).calibration
        return "; ".join(map(" ".join, describe_calibration(calibration)))

    def call(self, name: str, *command: str) -> None:
        """Runs a command; writes its output into NAME.log, or raises RuntimeError with its error line."""
        env = os.environ | {"HF_HOME": str(self.folder / "hf"), "HF_TOKEN_PATH": constants.HF_TOKEN_PATH}
        env |= {"HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_DATASETS_CACHE": str(datasets.config.HF_DATASETS_CACHE)}
        if not self.on_gpu:
            env |= CPU_ONLY
        elif name == "single":
            env["CUDA_VISIBLE_DEVICES"] = first_gpu()
        path = self.folder / f"{name}.log"
        with path.open("w") as log:  # a launcher that is killed would leave its ranks on the GPUs
            words = ["timeout", "--kill-after=60", str(TIMEOUT), *command]
            done = subprocess.run(words, cwd=PROJECT, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            text = path.read_text()
            found = r"^(?:error: |terminate called|Fatal Python error|\w*(?:Error|Exception)\b).*"  # also of an abort
            errors = re.findall(found, text, re.M) or [text[-300:]]
            raise RuntimeError(f"exit code {done.returncode}: {errors[0][:300]} ({path})")

    def compare(self, run: str, other: str) -> tuple[bool, str]:
        """Whether losses and gradient norms differ by at most ALLOWED times the noise, and how far they do.

        Noise is what calibration has measured in one process: how far a response's mean log-prob differs between batch
        shapes. At the start the slope of the loss is beta / 2. The loss is a mean over 2 x `batch` responses, whose
        errors are independent. The noise of a gradient's norm is relative: GRADIENT roundings."""
        noise = read_file(self.folder / "single" / DATA)["calibration"]["noise"]
        limits = ALLOWED * np.array([BETA * noise / (2 * self.batch) ** 0.5, GRADIENT * LOGP_ROUNDING["bf16"]])
        states = [json.loads((self.folder / name / TRAINER_STATE).read_text()) for name in (run, other)]
        steps = [[entry for entry in state["log_history"] if "loss" in entry] for state in states]
        rows = [(a["loss"] - b["loss"], a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(*steps, strict=True)]
        loss, norm = differences = np.abs(rows).max(axis=0)  # NaN if a step is NaN: then nothing agrees
        text = f"loss within {loss:.1e} ({limits[0]:.1e} allowed), gradient norm within {norm:.1%} ({limits[1]:.1%})"
        return bool((differences <= limits).all()), text

    def prepare(self, config: Config) -> None:
        """Writes the recipe's model with few layers and random weights, and its tokenizer."""
        shape = load_model_config(config)
        text = shape.get_text_config()
        text.num_hidden_layers = min(LAYERS, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        # 16 bit in the file, so that all launchers start with the same weights
        AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(self.folder / "model")
        load_tokenizer(config).save_pretrained(self.folder / "model")
        finish_model(self.folder / "model", None, None, narrow=False)

    def check_launch(self, run: str) -> tuple[str, str]:
        """Twenty steps against those of one process; a resumed run against the one that it resumes. Returns the result
        and what was found."""
        fields: dict[str, Any] = {}
        if run == "ZeRO-2":
            fields = {"save_strategy": "steps", "save_steps": self.max_steps // 2}
        elif run == "resumed":
            checkpoint = self.folder / f"ZeRO-2/checkpoint-{self.max_steps // 2}"
            if not checkpoint.exists():
                return "skip", "ZeRO-2 has left no checkpoint"
            fields["resume_from_checkpoint"] = checkpoint
        found = self.train(run, LAUNCHES[run], **fields)
        shutil.rmtree(self.folder / run / f"checkpoint-{self.max_steps}", ignore_errors=True)  # nobody resumes it
        if run == "single":
            return "pass", found
        agrees, text = self.compare(run, "ZeRO-2" if run == "resumed" else "single")
        return "pass" if agrees else "FAIL", text

    def check_full_model(self, run: str, config: Config) -> tuple[str, str]:
        """Calibration and a step under ZeRO-2, on a GPU of the recipe's own model and lengths, as far as its positions
        reach."""
        largest = max(FIRST_STEPS_FOR) if self.on_gpu else PER_DEVICE  # pairs in a micro-batch
        batch = 2 * largest * self.processes
        fields = {"per_device_train_batch_size": "", "max_steps": 1, "global_batch_size": batch}
        positions = count_positions(config, load_model_config(config))
        if positions and positions < (config.train.max_length or 0):
            fields |= {"max_length": positions, "max_prompt_length": positions // 2}
        found = self.train(run, "zero2", full_model=self.on_gpu, max_samples=4 * batch, **fields)
        for weights in (self.folder / run).glob("*.safetensors"):  # 13 GB that nobody needs
            weights.unlink()
        return "pass", found

    def run(self) -> list[dict[str, Any]]:
        """Runs all checks; prints each, and writes checks.json after it. Raises UserError if another job does so."""
        config = parse_config(short_run(self.recipe), training=False)  # an error leaves the last check
        self.folder.mkdir(parents=True, exist_ok=True)
        lease = take_folder(self.folder)
        for before in self.folder.glob("*/"):
            shutil.rmtree(before)
        self.prepare(config)
        rows: list[dict[str, Any]] = []
        for name in [*LAUNCHES, "full-model"]:
            start = time.monotonic()
            try:
                result, text = self.check_launch(name) if name in LAUNCHES else self.check_full_model(name, config)
            except Exception as error:  # whatever it is, the other checks say more
                result = "FAIL"
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            print(f"{result}  {name:<10}  {time.monotonic() - start:>4.0f} s  {text}", flush=True)
            rows.append({"check": name, "result": result, "found": text})
            write_json(self.folder / "checks.json", rows)
        lease.release()
        return rows
