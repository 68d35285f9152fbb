#!/usr/bin/env python
"""Speed and memory of this project against stock TRL, flag by flag. docs/speed.md says how to read the table.

CPU, 2 cores, about half an hour:   python bench/throughput.py
One GPU, layers of a 7B model:      python bench/throughput.py --model gpt_neox
As a test of the script:            python bench/throughput.py --quick

Every variant trains the same random model on the same random pairs through its trainer's own training loop, each time
in a fresh process, so that its peak memory is its own. A round runs all variants once; every other round runs them
in reverse order. Ratios are taken within a round.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

from sfm_dpo.common import cli

ROOT = Path(__file__).resolve().parents[1]
# Each variant keeps the flags of those before it.
VARIANTS = {
    "stock": {},
    "off": {},
    "padding_free": {"padding_free": True, "prefix_sharing": False},
    "precompute_ref_log_probs": {"precompute_ref_log_probs": True},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "prefix_sharing": {"prefix_sharing": True},
    "no_gradient_checkpointing": {"gradient_checkpointing": False},
    "torch_compile": {"torch_compile": True},
}
# The recipe's own flags, with --memory_gib as the limit of fit_memory, and with the peak of stock's first run.
SHIPPED = ("as_shipped", "as_shipped_in_stock_memory")
RECIPES = {"think": "think", "instruct": "instruct", "chat": "instruct"}
# hidden size, MLP size, layers, heads, vocabulary. CUDA: Pythia 6.9B and OLMo 3 7B, Llama 3 8B without grouped queries
SHAPES = {
    "cpu": dict.fromkeys(("olmo3", "gpt_neox", "llama", "olmo_hybrid"), (256, 688, 6, 4, 1024)),
    "cuda": {
        "gpt_neox": (4096, 16384, 8, 32, 50432),
        "olmo3": (4096, 11008, 8, 32, 100278),
        "llama": (4096, 14336, 8, 32, 128256),
    },
}
WARM_UP_BATCHES = 2
COLUMNS = {
    "pairs/s": "pairs_per_second",
    "epoch pairs/s": "epoch_pairs_per_second",
    "tokens/s": "tokens_per_second",
    "MFU": "mfu",
    "padding": "padding_fraction",
    "peak GiB": "peak_memory_gib",
}


def main(argv: list[str]) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as scratch:
        settings = vars(options) | {"scratch": scratch}
        work({"job": "prepare", **settings})
        facts = json.loads(Path(scratch, "facts.json").read_text())
        print(f"{facts['machine']}, PyTorch {facts['torch']}: {facts['model']}", flush=True)
        print(f"{facts['pairs']} pairs of '{options.lengths}' lengths, {facts['data']}", flush=True)
        runs: list[dict] = []
        for number in range(options.rounds):
            for variant in options.variants[:: -1 if number % 2 else 1]:
                stock: dict = next((run for run in runs if run["variant"] == "stock"), {})
                job = {"job": "train", "variant": variant, "stock_peak_gib": stock.get("peak_memory_gib"), **settings}
                runs.append(work(job) | {"round": number})
                print(f"round {number + 1}/{options.rounds}  {line(variant, runs[-1])}", flush=True)
    said = {name: value for name, value in vars(options).items() if name != "out"}
    result = {**facts, "options": said, "summary": summarise(runs, options.variants), "runs": runs}
    print("\n" + table(result["summary"]))
    print(f"as_shipped: the flags of {recipe_of(settings)}, as the recipe sets them")
    name = re.sub(r"[^A-Za-z0-9]+", "-", options.machine or facts["machine"]).strip("-").lower()
    path = Path(options.out) / f"{name}-{options.model}-{options.lengths}-{datetime.date.today()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten: {path}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser, count = cli.Arguments(description=__doc__), cli.number(int, 1)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--model", choices=list(SHAPES["cpu"]), default="olmo3", help="architecture")
    parser.add_argument("--shape", help="folder whose config.json is the model's, instead of --model and --layers")
    parser.add_argument("--layers", type=count, help="default: 6 on the CPU, 8 on a GPU (the real models have 32)")
    parser.add_argument("--lengths", choices=list(RECIPES), default="think", help="of which data")
    parser.add_argument("--scale", type=count, help="divides all lengths; default: 8, and 1 on a GPU or for chat")
    parser.add_argument("--pairs", type=count, help="measured pairs; default: 96")
    parser.add_argument("--batch", type=count, default=4, help="pairs in a micro-batch")
    parser.add_argument("--accumulation", type=count, default=4, help="micro-batches in an optimizer step")
    parser.add_argument("--rounds", type=count, help="default: 5")
    parser.add_argument(
        "--variants", nargs="+", choices=[*VARIANTS, *SHIPPED], default=[*VARIANTS, *SHIPPED], help="default: all"
    )
    parser.add_argument("--memory_gib", type=float, help="limit of as_shipped; default: 0.9 of the machine's")
    parser.add_argument("--machine", help="its name in the file; default: cores and CPU, or the GPU")
    parser.add_argument("--out", default=str(ROOT / "bench" / "results"), help="folder of the JSON file")
    parser.add_argument("--quick", action="store_true", help="tiny model, few pairs, one round: checks the script")
    options = parser.parse_args(argv)
    options.pairs = options.pairs or (8 if options.quick else 96)
    options.rounds = options.rounds or (1 if options.quick else 5)
    unit = options.batch * options.accumulation
    if options.quick:
        options.scale, options.batch, options.accumulation, unit = 128, 2, 2, 4
    if options.pairs % unit:
        parser.error(f"--pairs {options.pairs} is not a multiple of --batch x --accumulation = {unit}")
    if SHIPPED[1] in options.variants and options.variants[0] != "stock":
        parser.error(f"--variants {SHIPPED[1]} takes its limit from stock, which must come first")
    return options


def recipe_of(job: dict) -> Path:
    """The recipe for such a model and such data."""
    name = "olmo_hybrid_7b_instruct" if job["model"] == "olmo_hybrid" else RECIPES[job["lengths"]]
    return ROOT / "recipes" / f"{name}.yaml"


def work(job: dict) -> dict:
    """Runs a job of bench/worker.py in a process of its own and returns what it measured."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(dir=job["scratch"]) as home:
        environment |= {"HF_HOME": home}  # no log-probs of an earlier run
        if job["device"] == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(ROOT / "bench" / "worker.py"), json.dumps(job | {"home": home})]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{job['job']} {job.get('variant', '')} failed:\n{done.stderr[-4000:]}")
        return json.loads(Path(home, "result.json").read_text())


def summarise(runs: list[dict], variants: list[str]) -> dict[str, dict]:
    """Median over rounds of each figure, its spread, and the ratio to stock within the rounds."""
    first = {run["round"]: run for run in runs if run["variant"] == variants[0] and "error" not in run}
    summary = {}
    for variant in variants:
        mine = [run for run in runs if run["variant"] == variant and "error" not in run]
        if not mine:
            summary[variant] = {"error": next(run["error"] for run in runs if run["variant"] == variant)}
            continue
        numbers = [key for key, value in mine[0].items() if isinstance(value, int | float) and key != "round"]
        entry = {key: statistics.median(run[key] for run in mine) for key in numbers}
        rates = [run["pairs_per_second"] for run in mine]
        entry["spread"] = (max(rates) - min(rates)) / statistics.median(rates)
        for key in ("pairs_per_second", "epoch_pairs_per_second", "peak_memory_gib"):
            ratios = [run[key] / first[run["round"]][key] for run in mine if run["round"] in first]
            if not ratios:  # stock itself did not fit
                continue
            entry[f"{key}_ratio"] = statistics.median(ratios)
            entry[f"{key}_ratio_range"] = [min(ratios), max(ratios)]
        summary[variant] = entry
    return summary


def table(summary: dict[str, dict]) -> str:
    """Markdown. Ratios are to the first variant, with their range over the rounds."""
    base = next(iter(summary))
    head = ["variant", *COLUMNS, f"steps / {base}", f"epoch / {base}", f"peak / {base}", "spread"]
    rows = [head, ["---"] * len(head)]
    for variant, entry in summary.items():
        name = variant if variant in ("stock", "off", *SHIPPED) else f"+ {variant}"
        if "error" in entry:
            rows.append([name, entry["error"], *[""] * (len(head) - 2)])
            continue
        row = [name, *(number(entry[key]) for key in COLUMNS.values())]
        for key in ("pairs_per_second", "epoch_pairs_per_second", "peak_memory_gib"):
            low, high = entry.get(f"{key}_ratio_range", (float("nan"),) * 2)
            row.append(f"{entry.get(f'{key}_ratio', low):.2f} ({low:.2f}-{high:.2f})")
        rows.append([*row, f"{entry['spread']:.0%}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows)


def line(variant: str, run: dict) -> str:
    if "error" in run:
        return f"{variant:<28}{run['error']}"
    figures = "  ".join(f"{name} {number(run[key])}" for name, key in COLUMNS.items())
    return (
        f"{variant:<28}{figures}  reference {run['reference_seconds']:.1f} s  warm-up {run['warm_up_seconds']:.1f} s"
    )


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
