#!/usr/bin/env python
"""Speed and memory of this project against stock TRL, flag by flag. How to read the table: docs/memory-and-speed.md.

CPU, 2 cores, about half an hour:   python bench/throughput.py
One GPU, layers of a 7B model:      python bench/throughput.py --model gpt_neox
The demo's pretrained model, CPU:   python bench/throughput.py --model demo --lengths chat

Every variant trains the same model (random, but for the demo's) on the same random pairs through its trainer's own
training loop, each time in a fresh process, so that each variant has its own peak memory. A round runs all variants
once; every other round runs them in reverse order. Ratios are taken within a round.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sfm_dpo

sfm_dpo.setup()

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from sfm_dpo.common.cli import Arguments, number
from sfm_dpo.report.plots import COLORS, STYLE, running_mean

BATCH = 4  # pairs in a micro-batch
# Each variant keeps the flags of those before it.
VARIANTS: dict[str, dict] = {
    "stock": {},
    "off": {
        "padding_free": False,
        "precompute_ref_log_probs": False,
        "train_sampling_strategy": "random",
    },
    "padding_free": {"padding_free": True, "prefix_sharing": False},
    "batch_rebalance": {"precompute_ref_log_probs": True, "train_sampling_strategy": "batch_rebalance"},
    "prefix_sharing": {"prefix_sharing": True},
    "no_gradient_checkpointing": {"gradient_checkpointing": False},
    "torch_compile": {"torch_compile": True},
}
# The recipe's flags and the defaults; a run may use 0.9 of the free memory, or the peak of stock, which runs first
SHIPPED = ("as_shipped", "as_shipped_in_stock_memory")
RECIPES = dict(think="think", instruct="instruct", chat="instruct")  # by lengths
# Folders of bench/shapes
MODELS = dict(olmo3="olmo3_7b", gpt_neox="gpt_neox_6.9b", olmo_hybrid="olmo_hybrid_7b")
DEMO = ROOT / "outputs" / "demo-model"  # SmolLM2-135M-Instruct, made by `make demo`
COLUMNS = {
    "pairs/s": "pairs_per_second",
    "tokens/s": "tokens_per_second",
    "of a product": "mfu",
    "MFU": "mfu_data_sheet",
    "padding": "padding_fraction",
    "peak GiB": "peak_memory_gib",
}
LABELS = {"stock": "stock TRL", SHIPPED[1]: "this project, in the same memory"}  # in the picture
RATIOS = {"steps": "pairs_per_second", "epoch": "epoch_pairs_per_second"}


def main(argv: list[str]) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        settings = vars(options) | {"scratch": scratch}
        facts = work({"job": "prepare", **settings})
        print(f"{facts['machine']}, PyTorch {facts['torch']}: {facts['model']}", flush=True)
        print(facts["data"], flush=True)
        runs: list[dict] = []
        for round_number in range(options.rounds):
            for variant in options.variants[:: -1 if round_number % 2 else 1]:
                stock: dict = next((run for run in runs if run["variant"] == "stock"), {})
                job = {"job": "train", "variant": variant, "stock_peak_gib": stock.get("peak_memory_gib"), **settings}
                runs.append(work(job) | {"round": round_number})
                values = {name: format_value(runs[-1][key]) for name, key in COLUMNS.items() if key in runs[-1]}
                print(f"round {round_number + 1}/{options.rounds}", variant, values, flush=True)
    given = {name: value for name, value in vars(options).items() if name not in ("out", "plot")}
    result = {**facts, "options": given, "summary": summarise(runs, options.variants), "runs": runs}
    print("\n" + table(result["summary"]))
    name = re.sub(r"[^A-Za-z0-9]+", "-", facts["machine"]).strip("-").lower()
    path = Path(options.out) / f"{name}-{options.model}-{options.lengths}-{datetime.date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        draw(runs[: len(options.variants)], options.plot)
    print(f"\nwritten: {path}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Arguments(description=__doc__)
    count = number(int, 1)
    names = [*VARIANTS, *SHIPPED]
    models = [*MODELS, "demo"]
    parser.add_argument("--model", choices=models, default="olmo3", help="6 narrow layers, 8 real ones on a GPU")
    parser.add_argument("--lengths", choices=list(RECIPES), default="think", help="kind of data")
    parser.add_argument("--pairs", type=count, default=96, help="number of measured pairs")
    parser.add_argument("--accumulation", type=count, default=4, help="micro-batches in an optimizer step")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--variants", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--learning_rate", type=float, default=1e-6)
    parser.add_argument("--plot", metavar="PNG", help="draws loss against seconds here, of the first round")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results"), help="folder of the JSON file")
    parser.add_argument("--quick", action="store_true", help="tiny model, few pairs, one round: checks the script")
    options = parser.parse_args(argv)
    if options.quick:
        options.pairs = 8
        options.rounds = options.accumulation = 1
    if options.model == "demo" and not DEMO.is_dir():
        parser.error(f"--model demo: {DEMO} does not exist; run `make demo` first")
    if SHIPPED[1] in options.variants[: options.variants.index("stock") if "stock" in options.variants else None]:
        parser.error(f"--variants {SHIPPED[1]}: needs stock before it")
    if options.pairs % (BATCH * options.accumulation):
        parser.error(f"--pairs {options.pairs}: give a multiple of {BATCH} x --accumulation {options.accumulation}")
    return options


def recipe_of(job: dict) -> Path:
    """The recipe for the job's model and data."""
    name = "olmo_hybrid_7b_instruct" if job["model"] == "olmo_hybrid" else RECIPES[job["lengths"]]
    return ROOT / "recipes" / f"{name}.yaml"


def work(job: dict) -> dict:
    """Runs a job of bench/worker.py in its own process and returns its measurements."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(dir=job["scratch"]) as home:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment |= {"PYTHONPATH": path, "HF_HOME": home}  # no log-probs of an earlier run
        command = [sys.executable, str(ROOT / "bench" / "worker.py"), json.dumps(job | {"home": home})]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{job['job']} {job.get('variant', '')} failed:\n{done.stderr[-4000:]}")
        return json.loads(Path(home, "result.json").read_text())


def summarise(runs: list[dict], variants: list[str]) -> dict[str, dict]:
    """Median over rounds of each metric, and the ratio to the first variant within the rounds."""
    first = {run["round"]: run for run in runs if run["variant"] == variants[0] and "error" not in run}
    summary = {}
    for variant in variants:
        mine = [run for run in runs if run["variant"] == variant and "error" not in run]
        if not mine:
            summary[variant] = {"error": next(run["error"] for run in runs if run["variant"] == variant)}
            continue
        names = [key for key, value in mine[0].items() if isinstance(value, int | float) and key != "round"]
        entry = {key: statistics.median(run[key] for run in mine) for key in names}
        for key in RATIOS.values():
            ratios = [run[key] / first[run["round"]][key] for run in mine if run["round"] in first]
            if ratios:  # else the first variant did not fit
                entry[f"{key}_ratio"] = statistics.median(ratios)
                entry[f"{key}_ratio_range"] = [min(ratios), max(ratios)]
        summary[variant] = entry
    return summary


def table(summary: dict[str, dict]) -> str:
    """Markdown. Ratios are to the first variant, with their range over the rounds."""
    base = next(iter(summary))
    columns = [name for name, key in COLUMNS.items() if any(key in entry for entry in summary.values())]
    head = ["variant", *columns, *(f"{name} / {base}" for name in RATIOS)]
    rows = [head, ["---"] * len(head)]
    for variant, entry in summary.items():
        row = [variant if variant in ("stock", "off", *SHIPPED) else f"+ {variant}"]
        if "error" in entry:
            row += [entry["error"]]
        else:
            row += [format_value(entry[COLUMNS[name]]) for name in columns]
            row += [format_ratio(entry, key) for key in RATIOS.values()]
        rows.append(row + [""] * (len(head) - len(row)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(runs: list[dict], path: str) -> None:
    """Loss against seconds since the start of the reference pass; a running mean over each run's faint points."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for color, run in zip(COLORS, (run for run in runs if "error" not in run), strict=False):
            seconds, losses = np.transpose(run["curve"])
            smooth = running_mean(losses, 5) if len(losses) >= 5 else losses
            axes.plot(seconds, losses, color=color, alpha=0.25, linewidth=0.6)
            axes.plot(seconds, smooth, color=color, label=LABELS.get(run["variant"], run["variant"]))
        axes.set(title="Loss", xlabel="seconds, with the reference pass", ylabel="nats")
        axes.set_xlim(left=0)
        axes.legend()
        figure.savefig(path, facecolor="white")


def format_ratio(entry: dict, key: str) -> str:
    if f"{key}_ratio" not in entry:
        return ""
    low, high = entry[f"{key}_ratio_range"]
    return f"{entry[f'{key}_ratio']:.2f} ({low:.2f}-{high:.2f})"


def format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
