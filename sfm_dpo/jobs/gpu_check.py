"""GPU check: a list of checks that show whether everything is right and fast on this machine, one after the other.

Each check is a function of a Place that returns a Result, or raises; one that raises is a fail with its last line, and
the others still run. All computing is in processes of their own, so that none finds memory or a broken context of
another. Comparisons use the model's shape with few layers and random weights; memory and speed the complete model,
where a recipe is given. To add a check: write its function and put it into CHECKS.
"""

import json
import os
import re
import shutil
import signal
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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from sfm_dpo.common.files import CALIBRATION, PROJECT, now, write_json
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import parse_config
from sfm_dpo.data.sampler import FIRST_STEPS_FOR
from sfm_dpo.data.tokenization import load_tokenizer
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.run.folder import DATA

LAYERS, STEPS, PER_DEVICE = 4, 6, 2
SHAPE = PROJECT / "bench/shapes/olmo3_7b"  # where no recipe is given: windows and full attention
TIMEOUT = 600  # seconds for each process
CHAT = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant {% endif %}"
LOSS_TOLERANCE = 0.05  # as compare_runs.py where a run is in bf16
NORM_TOLERANCE = 0.1  # relative, of the gradient norm
MEMORY_TOLERANCE = 1.15  # measured over planned


@dataclass
class Result:
    """What a check found. `passed`: None where there is only a measurement."""

    passed: bool | None
    text: str


class Skipped(Exception):
    """The input of a check is missing, because an earlier one failed."""


@dataclass
class Place:
    """Where and with what the checks run.

    Attributes:
        recipe: the user's options of train_dpo.py; empty for the default shape.
        facts: what a check leaves for later ones and for calibration.json.
    """

    folder: Path
    recipe: list[str]
    processes: int
    on_gpu: bool
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def max_length(self) -> int:
        return 2048 if self.on_gpu else 96

    def need(self, fact: str, check: str) -> Any:
        if fact not in self.facts:
            raise Skipped(f"needs what the check {check!r} measures")
        return self.facts[fact]

    def options(self, run: str, **other: Any) -> list[str]:
        """Options of train_dpo.py for a run in the folder `run`; a field that is None is the recipe's."""
        fields = {
            "model_name_or_path": self.model,
            "dataset_name": self.folder / "pairs.jsonl",
            "output_dir": self.folder / run,
            "max_length": self.max_length,
            "max_prompt_length": self.max_length // 2,
            "global_batch_size": 2 * PER_DEVICE * self.processes,
            "per_device_train_batch_size": PER_DEVICE,
            "max_steps": STEPS,
            "learning_rate": 1e-4,
            "logging_steps": 1,
            "save_strategy": "no",
            "bf16": True,
            "use_cpu": not self.on_gpu,
            "padding_free": True,
            "precompute_ref_log_probs": True,
            "train_sampling_strategy": "batch_rebalance",
            "preflight": "skip",
            "guard": "skip",
            "use_peft": False,
            "push_to_hub": False,
            "report_to": "none",
            "dataset_num_proc": 1,
        }
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

    def call(self, name: str, *command: str) -> str:
        """Output of a command, also in NAME.log. Raises RuntimeError with the line of its error where it fails."""
        hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
        env = os.environ | {"HF_HOME": str(self.folder / "hf"), "HF_HUB_CACHE": str(Path(hub).expanduser())}
        if not self.on_gpu:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        elif "single" in name:
            env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        path = self.folder / f"{name}.log"
        with path.open("w") as log:
            streams: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=PROJECT, env=env, start_new_session=True, **streams)
        try:
            code = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        text = path.read_text()
        if code:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            named = [line for line in lines if re.match(r"error: |unhealthy |\w*(Error|Exception)\b", line)]
            line = [*named, *lines[-1:], "no output"][0]
            raise RuntimeError(f"exit code {code}: {line[:300]} ({path})")
        return text


def prepare(place: Place) -> None:
    """Writes a model of few layers with random weights, its tokenizer, and pairs of many lengths."""
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    tokenizer: Any
    if place.recipe:
        config = parse_config([*place.recipe, "--report_to", "none"], training=False)
        shape = load_model_config(config)
        tokenizer = load_tokenizer(config)
    else:
        words = ["<pad>", "<eos>", "user", "assistant", *(f"w{i}" for i in range(500))]
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
        tokenizer.chat_template = CHAT
        shape = AutoConfig.from_pretrained(SHAPE, pad_token_id=0, eos_token_id=1, bos_token_id=None)
        if not place.on_gpu:
            shape.vocab_size = len(tokenizer)
    # 16 bit in the file: then all launchers begin with the same weights
    model = AutoModelForCausalLM.from_config(shrink(shape, place.on_gpu), dtype=torch.bfloat16)
    model.save_pretrained(place.model)
    tokenizer.save_pretrained(place.model)
    write_pairs(place.folder / "pairs.jsonl", 2 * PER_DEVICE * place.processes * STEPS, place.max_length)


def shrink(shape: PretrainedConfig, on_gpu: bool) -> PretrainedConfig:
    """The shape with few layers, and on a CPU also narrow."""
    text = shape.get_text_config()
    text.num_hidden_layers = min(LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    if not on_gpu:
        grouped = getattr(text, "num_key_value_heads", None) not in (None, text.num_attention_heads)
        narrow = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
        narrow |= {"num_key_value_heads": 2 if grouped else 4, "sliding_window": 16}
        for name, value in narrow.items():
            if getattr(text, name, None):
                setattr(text, name, value)
    return shape


def write_pairs(path: Path, count: int, longest: int) -> None:
    """`count` pairs whose responses have up to `longest` words, as many of each order of magnitude."""
    rng = np.random.default_rng(0)

    def words(most: int) -> str:
        n = int(np.exp(rng.uniform(np.log(2), np.log(most))))
        return " ".join(f"w{i}" for i in rng.integers(500, size=n))

    with path.open("w") as file:
        for _ in range(count):
            row = {"prompt": words(longest // 4), "chosen": words(longest), "rejected": words(longest)}
            file.write(json.dumps(row) + "\n")


# ---- the checks


def check_node(place: Place) -> Result:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(place.processes)]
    output = place.call("node", *launch, "-m", "sfm_dpo.health.node_check", "--output_dir", str(place.folder))
    return Result(True, next(line for line in output.splitlines() if line.startswith("health: ")))


def check_paths(place: Place) -> Result:
    """parity.py: log-probs and gradients of packed and shared rows; where one is a bug it exits with 1."""
    out = place.folder / "paths.json"
    options = ["--variants", "packed,packed+bf16,shared,shared+bf16", "--json", str(out)]
    try:
        place.call("paths-single", sys.executable, "scripts/parity.py", *options, *place.options("paths", bf16=False))
    except RuntimeError:
        if not out.exists():
            raise
    rows = json.loads(out.read_text())["variants"]
    texts = [f"{row['variant']} {row['verdict']}" for row in rows]
    return Result(all(row["verdict"] != "bug" for row in rows), ", ".join(texts))


def check_kernels(place: Place) -> Result:
    """One process trains with each FlashAttention that is installed: loss against FA2's, and speed after warm-up."""
    first = place.train("single", "single", flash_attention="fa2" if place.on_gpu else None)
    place.facts["single"] = first
    if not place.on_gpu:
        return Result(None, f"SDPA {mean_speed(first):,.0f} tokens/s")
    speeds = {"FA2": mean_speed(first)}
    passed = True
    texts = []
    for kernel in ("FA3", "FA4"):
        try:
            steps = place.train(f"single-{kernel}", "single", flash_attention=kernel.lower())
        except RuntimeError as error:  # its package is not installed, or has no kernel for this GPU
            texts.append(f"{kernel}: {error}")
            continue
        apart = largest_difference(steps, first)
        if apart <= LOSS_TOLERANCE:
            speeds[kernel] = mean_speed(steps)
        else:
            passed = False
            texts.append(f"{kernel}: loss differs by {apart:.1e}")
    place.facts["flash"] = max(speeds, key=lambda kernel: speeds[kernel])
    texts = [f"{kernel} {speed:,.0f} tokens/s" for kernel, speed in speeds.items()] + texts
    return Result(passed, "; ".join(texts))


def mean_speed(steps: list[dict[str, Any]]) -> float:
    return fmean(step["perf/tokens_per_second"] for step in steps[1:])


def largest_difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    """Of the losses; NaN where one is."""
    return float(np.max([abs(one["loss"] - other["loss"]) for one, other in zip(a, b, strict=True)]))


def check_launcher(place: Place, launch: str) -> Result:
    alone = place.need("single", "attention kernels")
    steps = place.train(launch, launch, save_strategy="steps" if launch == "zero2" else "no", save_steps=STEPS // 2)
    loss = largest_difference(steps, alone)
    norm = np.max([abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(steps, alone, strict=True)])
    text = f"{STEPS} steps against one process: loss within {loss:.1e}, gradient norm within {norm:.1%}"
    return Result(bool(loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE), text)


def check_resume(place: Place) -> Result:
    checkpoint = place.folder / "zero2" / f"checkpoint-{STEPS // 2}"
    if not checkpoint.exists():
        raise Skipped("needs the checkpoint of the check 'ZeRO-2'")
    resumed = place.train("resumed", "zero2", resume_from_checkpoint=checkpoint)
    expected = place.steps("zero2")
    apart = largest_difference(resumed, expected)
    bitwise = all(a[key] == b[key] for a, b in zip(resumed, expected, strict=True) for key in ("loss", "grad_norm"))
    return Result(apart <= LOSS_TOLERANCE, f"loss {'bitwise equal' if bitwise else f'within {apart:.1e}'}")


def check_memory(place: Place) -> Result:
    """The complete model where there is a recipe, its own batch and lengths; leaves MFU and save time to others."""
    fields: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-6}
    fields |= {"fit_memory": True, "per_device_train_batch_size": None}
    if place.recipe:
        recipe = parse_config([*place.recipe, "--report_to", "none"], training=False)
        size = max(FIRST_STEPS_FOR) if recipe.fitted else recipe.micro_batch
        of_recipe = "max_length max_prompt_length padding_free train_sampling_strategy model_name_or_path "
        fields |= dict.fromkeys((of_recipe + "precompute_ref_log_probs use_peft").split())
        if not recipe.train.fit_memory:  # then what it asks for is named, and kept
            fields |= {"per_device_train_batch_size": size}
            fields |= {"gradient_checkpointing": recipe.train.gradient_checkpointing}
        fields["global_batch_size"] = 2 * size * place.processes
        fields["dataset_name"] = place.folder / "long.jsonl"
        write_pairs(place.folder / "long.jsonl", 4 * fields["global_batch_size"], recipe.train.max_length)
    steps = place.train("memory", "zero2", **fields)
    planned = json.loads((place.folder / "memory" / DATA).read_text())["fit_memory"]["bytes"] / 2**30
    measured = max(step["perf/peak_memory_gib"] for step in steps)
    text = (place.folder / "memory.log").read_text()
    saves = re.findall(r"checkpoint saved in ([\d.]+) s", text)
    place.facts |= {"memory_ratio": measured / planned, "steps": steps, "save": max(map(float, saves))}
    shutil.rmtree(place.folder / "memory")  # a checkpoint of the complete model
    passed = measured <= MEMORY_TOLERANCE * planned if place.on_gpu else None
    setting = re.findall("fit_memory: (.*), of", text)[0]
    return Result(passed, f"{setting}; {measured:.2f} GiB measured")


def check_save(place: Place) -> Result:
    seconds = place.need("save", "memory")
    lead = float(os.environ.get("STOP_LEAD_SECONDS") or 600)
    return Result(seconds < lead / 2, f"a checkpoint takes {seconds:.1f} s of the {lead:.0f} s before the time limit")


def check_throughput(place: Place) -> Result:
    steps = place.need("steps", "memory")
    text = f"{mean_speed(steps):,.0f} tokens/s on {place.processes}"
    if "perf/mfu" in steps[0]:
        place.facts["mfu"] = fmean(step["perf/mfu"] for step in steps[1:])
        text += f", {place.facts['mfu']:.1%} MFU"
    return Result(None, text)


def check_speed_flags(place: Place) -> Result:
    """bench/throughput.py, each flag on top of those before it."""
    out = place.folder / "bench"
    options = ["--variants", "stock", "batch_rebalance", "torch_compile", "--out", str(out)]
    options += ["--shape", str(place.model), "--pairs", "32", "--accumulation", "2", "--rounds", "1"]
    if not place.on_gpu:
        options.append("--quick")
    place.call("bench-single", sys.executable, "bench/throughput.py", *options)
    texts = []
    for name, row in json.loads(next(out.glob("*.json")).read_text())["summary"].items():
        speed = row.get("error") or f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"
        graphs = f", {row['graphs']:.0f} graphs" if row.get("graphs") else ""
        texts.append(f"{name} {speed}{graphs}")
    return Result(None, "; ".join(texts))


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Place], Result]
    remedy: str


CHECKS = [
    Check("node", check_node, "another node (--exclude); the lines that begin with unhealthy say why"),
    Check("packed and shared rows", check_paths, "prefix_sharing: false; where packed is a bug: padding_free: false"),
    Check("attention kernels", check_kernels, "flash_attention: fa2"),
    Check("ZeRO-2", partial(check_launcher, launch="zero2"), "LAUNCH=fsdp2"),
    Check("FSDP2", partial(check_launcher, launch="fsdp2"), "LAUNCH=zero2"),
    Check("ZeRO-3", partial(check_launcher, launch="zero3"), "LAUNCH=fsdp2"),
    Check("resume", check_resume, "a time limit within which the run ends"),
    Check("memory", check_memory, "per_device_train_batch_size, max_length, more GPUs, LAUNCH=fsdp2"),
    Check("checkpoint", check_save, "STOP_LEAD_SECONDS and --signal=B:USR1@ of twice the time; a faster disk"),
    Check("throughput", check_throughput, "profile_steps shows where the time goes"),
    Check("speed flags", check_speed_flags, "the flag that is no faster; torch_compile where it makes many graphs"),
]


def run_checks(place: Place) -> list[dict[str, Any]]:
    """Runs CHECKS in order; prints each and writes checks.json and calibration.json after it."""
    gpu = torch.cuda.get_device_name() if place.on_gpu else "cpu"
    prepare(place)
    rows: list[dict[str, Any]] = []
    for check in CHECKS:
        start = time.monotonic()
        try:
            found = check.run(place)
            result = {True: "pass", False: "FAIL", None: "measured"}[found.passed]
            text = found.text
        except Skipped as reason:
            result = "skipped"
            text = str(reason)
        except Exception as error:  # whatever it is, the other checks say more
            result = "FAIL"
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        row = {"check": check.name, "result": result, "found": text, "seconds": round(time.monotonic() - start)}
        rows.append(row | {"remedy": check.remedy if result == "FAIL" else ""})
        print(f"{result:<8} {check.name}: {text}", flush=True)
        write_json(place.folder / "checks.json", rows)
        if "memory_ratio" in place.facts:
            facts = {name: place.facts.get(name) for name in ("mfu", "memory_ratio", "flash")}
            facts |= {"gpu": gpu, "model": " ".join(place.recipe) or SHAPE.name}
            write_json(place.folder / CALIBRATION.name, facts | {"processes": place.processes, "time": now()})
    return rows


def format_checks(rows: list[dict[str, Any]]) -> str:
    cells = [(row["check"], row["result"], f"{row['seconds']} s", row["found"]) for row in rows]
    remedies = [f"{row['check']}: turn off or change: {row['remedy']}" for row in rows if row["remedy"]]
    return "\n".join([format_table(cells, indent=0), *remedies])
