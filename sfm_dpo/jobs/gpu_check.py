"""GPU check: a list of checks that show whether everything is right and fast on this machine, one after the other.

Each check is a function of a Place that returns a Result, or raises; one that raises is a fail with its last line, and
the others go on. All computing is in processes of their own, so that none finds memory or a broken context of another.
Comparisons use the model's shape with few layers and random weights; memory and speed the whole model where a recipe
is given. To add a check: write its function and put it into CHECKS.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import CALIBRATION, PROJECT, now, write_atomically, write_json
from sfm_dpo.common.tables import format_table
from sfm_dpo.config import Config, parse_config
from sfm_dpo.data.sampler import FIRST_STEPS_FOR
from sfm_dpo.data.tokenization import load_tokenizer
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.model.packing import describe_delta_nets
from sfm_dpo.report.page import render_page
from sfm_dpo.run.checkpoint import STOP
from sfm_dpo.run.folder import DATA, read_status

LAYERS, STEPS, PER_DEVICE = 4, 6, 2
SHAPE = PROJECT / "bench/shapes/olmo3_7b"  # where no recipe is given: windows and full attention
TIMEOUT = 600  # seconds for each process
CHAT = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant {% endif %}"
# Of the loss: as compare_runs.py where a run is in bf16; of the gradient norm and of attention: relative
LOSS_TOLERANCE, NORM_TOLERANCE, ATTENTION_TOLERANCE, MEMORY_TOLERANCE = 0.05, 0.1, 0.02, 1.15


@dataclass
class Result:
    """What a check found. `passed`: None where there is only a figure."""

    passed: bool | None
    figure: str


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

    def fields(self, run: str, **other: Any) -> list[str]:
        """Options of a run in the folder `run`."""
        values = {
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
            "bf16": "true",
            "use_cpu": "false" if self.on_gpu else "true",
            "padding_free": "true",
            "precompute_ref_log_probs": "true",
            "train_sampling_strategy": "batch_rebalance",
            **dict.fromkeys(("preflight", "guard"), "skip"),
            **dict.fromkeys(("use_peft", "push_to_hub"), "false"),
            "report_to": "none",
            "dataset_num_proc": 1,
        }
        options = [(f"--{name}", str(value)) for name, value in (values | other).items() if value is not None]
        return [*self.recipe, *(word for option in options for word in option)]

    def launcher(self, launch: str) -> list[str]:
        """The command before a script: single, zero2, zero3 or fsdp2."""
        if launch == "single":
            return [sys.executable]
        name = launch if self.on_gpu else {"zero2": "cpu"}.get(launch, f"cpu_{launch}")
        file = "accelerate_config.yaml" if name == "zero2" else f"configs/accelerate/{name}.yaml"
        where = ["--config_file", file, "--num_processes", str(self.processes), "--main_process_port", "0"]
        return [sys.executable, "-m", "accelerate.commands.launch", *where]

    def call(self, name: str, *command: str) -> str:
        """Output of a command, also in NAME.log. Raises RuntimeError with the line of its error where it fails."""
        with self.start(name, *command) as process:
            try:
                code: int | str = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = f"none after {TIMEOUT} s"
        return self.read_log(name, code)

    def start(self, name: str, *command: str) -> subprocess.Popen:
        hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub")
        env = os.environ | {"HF_HOME": str(self.folder / "hf"), "HF_HUB_CACHE": str(Path(hub).expanduser())}
        if not self.on_gpu:
            env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        elif "single" in name:
            env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        with (self.folder / f"{name}.log").open("w") as log:
            streams: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.Popen(command, cwd=PROJECT, env=env, start_new_session=True, **streams)

    def read_log(self, name: str, code: int | str = 0) -> str:
        text = (self.folder / f"{name}.log").read_text()
        if code:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            named = [line for line in lines if re.match(r"error: |unhealthy |\w*(Error|Exception)\b", line)]
            line = [*named, *lines[-1:], "no output"][0]
            raise RuntimeError(f"exit code {code}: {line[:300]} ({self.folder}/{name}.log)")
        return text

    def train(self, run: str, launch: str, **fields: Any) -> list[dict[str, Any]]:
        """Trains in a process or several; returns the logged steps."""
        self.call(run, *self.launcher(launch), "scripts/check_gpu.py", "train", *self.fields(run, **fields))
        return self.steps(run)

    def steps(self, run: str) -> list[dict[str, Any]]:
        history = json.loads((self.folder / run / "trainer_state.json").read_text())["log_history"]
        return [entry for entry in history if "loss" in entry]


def prepare(place: Place) -> None:
    """Writes a model of few layers with random weights, its tokenizer, and pairs of many lengths."""
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    if place.recipe:
        config = read_recipe(place)
        shape, tokenizer = load_model_config(config, needs_weights=False), load_tokenizer(config)
    else:
        shape, tokenizer = AutoConfig.from_pretrained(SHAPE), make_tokenizer()
        shape.vocab_size = len(tokenizer) if not place.on_gpu else shape.vocab_size
        shape.pad_token_id, shape.eos_token_id, shape.bos_token_id = 0, 1, None
    # 16 bit in the file: then all launchers begin with the same weights
    model = AutoModelForCausalLM.from_config(shrink(shape, place.on_gpu), dtype=torch.bfloat16)
    model.save_pretrained(place.model)
    tokenizer.save_pretrained(place.model)
    write_pairs(place.folder / "pairs.jsonl", 2 * PER_DEVICE * place.processes * STEPS, place.max_length)


def read_recipe(place: Place) -> Config:
    cpu = [] if place.on_gpu else ["--use_cpu", "true"]
    return parse_config([*place.recipe, "--report_to", "none", *cpu], training=False)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    words = ["<pad>", "<eos>", "user", "assistant", *(f"w{i}" for i in range(500))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = CHAT
    return tokenizer


def shrink(shape: PretrainedConfig, on_gpu: bool) -> PretrainedConfig:
    """The shape with few layers, and on a CPU also narrow."""
    text = shape.get_text_config()
    text.num_hidden_layers = min(LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    if not on_gpu:
        grouped = getattr(text, "num_key_value_heads", None) not in (None, text.num_attention_heads)
        text.hidden_size, text.intermediate_size, text.num_attention_heads = 64, 96, 4
        for name, value in {"num_key_value_heads": 2 if grouped else 4, "head_dim": 16, "sliding_window": 16}.items():
            if getattr(text, name, None):
                setattr(text, name, value)
    return shape


def write_pairs(path: Path, count: int, longest: int) -> None:
    """`count` pairs whose responses have up to `longest` words, as many of each order of magnitude."""
    rng = np.random.default_rng(0)

    def words(most: int) -> str:
        n = int(np.exp(rng.uniform(np.log(2), np.log(most))))
        return " ".join(f"w{i}" for i in rng.integers(500, size=n))

    rows = [
        {"prompt": words(longest // 4), "chosen": words(longest), "rejected": words(longest)} for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- the checks


def check_node(place: Place) -> Result:
    ranks = ["--standalone", "--nproc-per-node", str(place.processes), "-m", "sfm_dpo.health.node_check"]
    output = place.call(
        "node", sys.executable, "-m", "torch.distributed.run", *ranks, "--output_dir", str(place.folder)
    )
    return Result(True, next(line for line in output.splitlines() if line.startswith("health: ")))


def check_attention(place: Place) -> Result:
    place.call("attention-single", sys.executable, "scripts/check_gpu.py", "attention", str(place.folder))
    rows = json.loads((place.folder / "attention.json").read_text())
    wrong = [row for row in rows if not row.get("error", 0) <= ATTENTION_TOLERANCE]  # NaN is wrong, too
    texts = [
        f"{row['kernel']} {row['case']} " + (row.get("obstacle") or f"error {row['error']:.1e}, {row['ms']:.1f} ms")
        for row in wrong or rows
    ]
    right = {row["kernel"] for row in rows if "ms" in row} - {row["kernel"] for row in wrong}
    if place.on_gpu and right:
        place.facts["flash"] = min(right, key=lambda kernel: sum(row["ms"] for row in rows if row["kernel"] == kernel))
    return Result(not wrong, "; ".join(texts))


def compare_paths(place: Place, name: str, variants: str, **fields: Any) -> dict[str, str]:
    """The verdict of parity.py on each variant's log-probs and gradients; where one is a bug it exits with 1."""
    out = place.folder / f"{name}.json"
    command = ["scripts/parity.py", "--variants", variants, "--json", str(out)]
    try:
        place.call(f"{name}-single", sys.executable, *command, *place.fields(name, bf16="false", **fields))
    except RuntimeError:
        if not out.exists():
            raise
    return {row["variant"]: row["verdict"] for row in json.loads(out.read_text())["variants"]}


def judge_paths(verdicts: dict[str, str]) -> Result:
    return Result("bug" not in verdicts.values(), ", ".join(map(" ".join, verdicts.items())))


def check_parity(place: Place) -> Result:
    verdicts = compare_paths(place, "parity", "padded,packed,packed+bf16,shared,shared+bf16")
    place.facts["shared"] = {name: verdicts.pop(name) for name in ("shared", "shared+bf16")}
    return judge_paths(verdicts)


def check_sharing(place: Place) -> Result:
    off = re.search(r"prefix_sharing is off: .*", place.read_log("parity-single"))
    return Result(None, off[0]) if off else judge_paths(place.facts["shared"])


def check_hybrid(place: Place) -> Result:
    """OLMo-Hybrid's layers, narrow: packed against single sequences."""
    folder, tokenizer = place.folder / "hybrid", AutoTokenizer.from_pretrained(place.model)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    sizes = {"hidden_size": 128, "intermediate_size": 192, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    sizes |= {f"{name}_heads": 4 for name in ("num_attention", "num_key_value", "linear_num_key", "linear_num_value")}
    sizes |= {"vocab_size": len(tokenizer), "num_hidden_layers": len(kinds), "pad_token_id": tokenizer.pad_token_id}
    shape = AutoConfig.for_model("olmo_hybrid", layer_types=kinds, eos_token_id=None, bos_token_id=None, **sizes)
    model = AutoModelForCausalLM.from_config(shape)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    variants = "separate+batch_1,packed,packed+bf16"
    result = judge_paths(compare_paths(place, "hybrid-paths", variants, model_name_or_path=folder))
    return Result(result.passed, result.figure + describe_delta_nets(model))


def check_launcher(launch: str) -> Callable[[Place], Result]:
    def check(place: Place) -> Result:
        if "single" not in place.facts:
            place.facts["single"] = place.train("single", "single", global_batch_size=2 * PER_DEVICE * place.processes)
        save = {"save_strategy": "steps", "save_steps": STEPS} if launch == "zero2" else {}
        steps, alone = place.train(launch, launch, **save), place.facts["single"]
        loss = np.max([abs(a["loss"] - b["loss"]) for a, b in zip(steps, alone, strict=True)])  # NaN stays NaN
        norm = np.max([abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(steps, alone, strict=True)])
        return Result(
            bool(loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE),
            f"{STEPS} steps against one process: loss within {loss:.1e}, gradient norm within {norm:.1%}",
        )

    return check


def check_dtypes(place: Place) -> Result:
    """As tests/e2e/test_bf16.py asserts them: 16 bit where DeepSpeed holds weights, fp32 masters, moments and RoPE."""
    wrong = []
    for launch in ("zero2", "zero3", "fsdp2"):
        dtypes = json.loads((place.folder / launch / "dtypes.json").read_text())
        expected = {"parameters": ["torch.float32" if launch == "fsdp2" else "torch.bfloat16"]}
        expected |= {name: ["torch.float32"] for name in ("optimizer", "reference", "rope")}
        wrong += [f"{launch} {name} {dtypes[name]}" for name, kinds in expected.items() if dtypes[name] != kinds]
    return Result(not wrong, "; ".join(wrong) or "bf16 weights, fp32 masters, moments, reference and RoPE")


def check_resume(place: Place) -> Result:
    command = [*place.launcher("zero2"), "scripts/check_gpu.py", "train", *place.fields("stopped", save_steps=STEPS)]
    command[command.index("--save_strategy") + 1] = "steps"
    run, deadline = place.folder / "stopped", time.monotonic() + TIMEOUT
    process = place.start("stopped", *command)
    while process.poll() is None and time.monotonic() < deadline:
        if (read_status(run) or {}).get("step"):
            (run / STOP).touch()
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    place.read_log("stopped", process.wait())
    stopped = read_status(run) or {}
    if (state := stopped.get("state")) != "stopped":
        return Result(False, f"asked to stop at step 1, it ended as {state} at step {stopped.get('step')}")
    place.call("resumed", *command)
    pairs = list(zip(place.steps("stopped"), place.steps("zero2"), strict=True))
    apart = np.max([abs(a["loss"] - b["loss"]) for a, b in pairs])
    bitwise = all(a[key] == b[key] for a, b in pairs for key in ("loss", "grad_norm"))
    same = "bitwise" if bitwise else f"within {apart:.1e}"
    return Result(bool(apart <= LOSS_TOLERANCE), f"stopped at step {stopped['step']} of {STEPS}, resumed: loss {same}")


def check_memory(place: Place) -> Result:
    """The whole model where there is a recipe, its own batch and lengths; leaves MFU and save time to later checks."""
    fields: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4, "learning_rate": 1e-6}
    fields |= {"fit_memory": "true", "per_device_train_batch_size": None}
    if place.recipe:
        recipe = read_recipe(place)
        train, size = recipe.train, max(FIRST_STEPS_FOR) if recipe.fitted else recipe.micro_batch
        of_recipe = "max_length max_prompt_length padding_free train_sampling_strategy model_name_or_path "
        fields |= dict.fromkeys((of_recipe + "precompute_ref_log_probs use_peft").split())
        if not train.fit_memory:  # then what it asks for is named, and kept
            fields |= {"per_device_train_batch_size": size, "gradient_checkpointing": train.gradient_checkpointing}
        fields["global_batch_size"] = 2 * size * place.processes
        fields["dataset_name"] = place.folder / "long.jsonl"
        write_pairs(place.folder / "long.jsonl", 4 * fields["global_batch_size"], train.max_length)
    steps = place.train("memory", "zero2", **fields)
    chosen = json.loads((place.folder / "memory" / DATA).read_text())["fit_memory"]
    planned, measured = chosen["bytes"] / 2**30, max(step["perf/peak_memory_gib"] for step in steps)
    text = place.read_log("memory")
    saves, setting = re.findall(r"checkpoint saved in ([\d.]+) s", text), re.findall("fit_memory: (.*), of", text)[0]
    place.facts |= {"memory_ratio": measured / planned, "steps": steps[1:], "save": max(map(float, saves))}
    shutil.rmtree(place.folder / "memory")  # a checkpoint of the whole model
    passed = measured <= MEMORY_TOLERANCE * planned if place.on_gpu else None
    return Result(passed, f"{setting}; {measured:.2f} GiB measured")


def check_save(place: Place) -> Result:
    lead, seconds = float(os.environ.get("STOP_LEAD_SECONDS") or 600), place.facts["save"]
    return Result(seconds < lead / 2, f"a checkpoint takes {seconds:.1f} s of a lead of {lead:.0f} s")


def check_throughput(place: Place) -> Result:
    steps = place.facts["steps"]
    rate = np.mean([step["perf/tokens_per_second"] for step in steps])
    mfu = [step["perf/mfu"] for step in steps if "perf/mfu" in step]
    place.facts["mfu"] = float(np.mean(mfu)) if mfu else None
    return Result(None, f"{rate:,.0f} tokens/s on {place.processes}" + (f", {np.mean(mfu):.1%} MFU" if mfu else ""))


def check_speed_flags(place: Place) -> Result:
    """bench/throughput.py, each flag on top of those before it."""
    quick = ["--quick", "--variants", "stock", "batch_rebalance", "torch_compile"]
    real = ["--shape", str(place.model), "--pairs", "32", "--accumulation", "2", "--rounds", "1"]
    out = place.folder / "bench"
    place.call(
        "bench-single", sys.executable, "bench/throughput.py", *(real if place.on_gpu else quick), "--out", str(out)
    )
    summary = json.loads(next(out.glob("*.json")).read_text())["summary"]
    texts = [
        f"{name} " + (row.get("error") or f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}")
        for name, row in summary.items()
    ]
    compiled = summary.get("torch_compile", {})
    graphs = f"; torch_compile made {compiled['graphs']:.0f} graphs" if "graphs" in compiled else ""
    return Result(None, "; ".join(texts) + graphs)


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Place], Result]
    remedy: str


CHECKS = [
    Check("node", check_node, "another node (--exclude); the lines that begin with unhealthy say why"),
    Check("packed attention", check_attention, "padding_free: false; a newer PyTorch or driver"),
    Check("packed against padded", check_parity, "padding_free: false"),
    Check("prefix sharing", check_sharing, "prefix_sharing: false"),
    Check("hybrid layers", check_hybrid, "padding_free: false for OLMo-Hybrid; other versions of fla, causal_conv1d"),
    Check("ZeRO-2", check_launcher("zero2"), "LAUNCH=fsdp2"),
    Check("FSDP2", check_launcher("fsdp2"), "LAUNCH=zero2"),
    Check("ZeRO-3", check_launcher("zero3"), "LAUNCH=fsdp2"),
    Check("bf16 dtypes", check_dtypes, "the launcher that is named"),
    Check("stop and resume", check_resume, "a time limit that holds the whole run"),
    Check("memory", check_memory, "per_device_train_batch_size, max_length, more GPUs, LAUNCH=fsdp2"),
    Check("checkpoint", check_save, "STOP_LEAD_SECONDS and --signal=B:USR1@ of twice the time; a faster disk"),
    Check("throughput", check_throughput, "profile_steps says where the time goes"),
    Check("speed flags", check_speed_flags, "the flag that is no faster; torch_compile where it makes many graphs"),
]


def run_checks(place: Place) -> list[dict[str, Any]]:
    """Runs CHECKS in order; prints each, and writes report.html and calibration.json into the folder."""
    place.facts["gpu"] = torch.cuda.get_device_name() if place.on_gpu else "cpu"
    prepare(place)
    rows: list[dict[str, Any]] = []
    for check in CHECKS:
        start = time.monotonic()
        try:
            result = check.run(place)
        except Exception as error:  # whatever it is, the other checks say more
            result = Result(False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        verdict = {True: "pass", False: "FAIL", None: "figure"}[result.passed]
        rows.append({"check": check.name, "result": verdict, "figure": result.figure})
        rows[-1] |= {"remedy": check.remedy if verdict == "FAIL" else "", "seconds": round(time.monotonic() - start)}
        print(f"{verdict:<7} {check.name}: {result.figure}", flush=True)
    facts = {name: place.facts.get(name) for name in ("gpu", "mfu", "memory_ratio", "flash")}
    facts |= {"model": " ".join(place.recipe) or SHAPE.name, "processes": place.processes, "time": now()}
    if facts["memory_ratio"]:
        write_json(place.folder / CALIBRATION.name, facts)
    write_json(place.folder / "checks.json", rows)
    write_atomically(place.folder / "report.html", render_page("gpu_check.html.jinja", rows=rows, facts=facts))
    return rows


def format_checks(rows: list[dict[str, Any]]) -> str:
    cells = [(row["check"], row["result"], f"{row['seconds']} s", row["figure"]) for row in rows]
    remedies = [(row["check"], f"turn off or change: {row['remedy']}") for row in rows if row["remedy"]]
    return "\n".join([format_table(cells, indent=0), *([format_table(remedies, indent=0)] if remedies else [])])


# ---- what runs in processes of its own


def record_dtypes(trainer_class: Any) -> None:
    """Makes a trainer write dtypes.json while it trains: of weights, optimizer, reference log-probs and RoPE."""
    compute_loss = trainer_class._compute_loss

    def recording(self, model, inputs, return_outputs):
        if self.model.training and self.is_world_process_zero():
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            masters = [p for group in optimizer.param_groups for p in group["params"]]  # none under ZeRO-3
            moments = [v for state in optimizer.state.values() for v in state.values()]
            kinds = {
                "parameters": self.model.parameters(),
                "reference": [inputs["ref_chosen_logps"]],
                "rope": [buffer for name, buffer in self.model.named_buffers() if "inv_freq" in name],
                "optimizer": [t for t in masters + moments if isinstance(t, torch.Tensor) and t.dim()],
            }
            dtypes = {kind: sorted({str(tensor.dtype) for tensor in tensors}) for kind, tensors in kinds.items()}
            write_json(Path(self.args.output_dir) / "dtypes.json", dtypes)
        return compute_loss(self, model, inputs, return_outputs)

    trainer_class._compute_loss = recording


def measure_attention(folder: Path) -> None:
    """Writes attention.json: error and milliseconds of packed attention, forward and backward in bf16, by each kernel.

    The oracle is softmax over a mask in fp32, from the same bf16 inputs.
    """
    from torch.nn.attention import list_flash_attention_impls

    from sfm_dpo.model.attention import activate_flash, boundary_mask, packed_attention_forward

    config = AutoConfig.from_pretrained(folder / "model").get_text_config()
    on_gpu = torch.cuda.is_available()
    device, heads = "cuda" if on_gpu else "cpu", config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    lengths = torch.tensor([1000, 1, 517, 2048, 130] if on_gpu else [40, 1, 23, 64], device=device)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    total, window = int(bounds[-1]), 256 if on_gpu else 16
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    distance = torch.arange(total, device=device)[:, None] - torch.arange(total, device=device)
    same = (sequence[:, None] == sequence) & (distance >= 0)
    mask = boundary_mask(bounds, int(lengths.max()))
    rows: list[dict[str, Any]] = []

    def expected(q, k, v, window) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
        scores = q @ k.transpose(-1, -2) / head_dim**0.5
        visible = same if window is None else same & (distance < window)
        return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    def measure(kernel: str, case: str, kv_heads: int, size: int | None) -> dict[str, Any]:
        torch.manual_seed(0)
        inputs = [torch.randn(1, n, total, head_dim, device=device).bfloat16() for n in (heads, kv_heads, kv_heads)]
        gradient = torch.randn(1, total, heads, head_dim, device=device).bfloat16()
        ours = [tensor.clone().requires_grad_() for tensor in inputs]
        oracle = [tensor.float().requires_grad_() for tensor in inputs]
        for _ in range(2):  # the first one loads the kernel
            start = time.perf_counter()
            output = packed_attention_forward(module, ours[0], ours[1], ours[2], mask, sliding_window=size)[0]
            found = [output, *torch.autograd.grad(output, ours, gradient)]
            if on_gpu:
                torch.cuda.synchronize()
            ms = 1000 * (time.perf_counter() - start)
        truth = expected(oracle[0], oracle[1], oracle[2], size)
        pairs = zip(found, [truth, *torch.autograd.grad(truth, oracle, gradient.float())], strict=True)
        worst = max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)
        return {"kernel": kernel, "case": case, "error": worst, "ms": ms}

    module = torch.nn.Module()
    cases = ("full", heads, None), ("window", heads, window), ("grouped", heads // 2, None)
    for kernel in ["FA2", *list_flash_attention_impls()] if on_gpu else ["SDPA"]:
        try:
            if on_gpu:
                activate_flash(kernel.lower())
            rows += [measure(kernel, *case) for case in cases]
        except Exception as error:  # its package is not installed, or has no kernel for this GPU
            if kernel in ("FA2", "SDPA"):
                raise
            rows.append({"kernel": kernel, "case": "", "obstacle": str(error).splitlines()[0][:150]})
    write_json(folder / "attention.json", rows)


def make_place(recipe: list[str], processes: int | None) -> Place:
    """A Place in outputs/check-gpu for this machine.

    Raises:
        UserError: neither a GPU nor LAUNCH=cpu.
    """
    on_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    if not on_gpu and os.environ.get("DS_ACCELERATOR") != "cpu":
        raise UserError("no GPU is visible; for the twin on two CPU processes: LAUNCH=cpu sbatch scripts/check_gpu.sh")
    return Place(CALIBRATION.parent, recipe, processes or (torch.cuda.device_count() if on_gpu else 2), on_gpu)
