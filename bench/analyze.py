"""Speed and peak memory of tokenising pairs, against one row at a time and tokenizers' own encode_batch.

    python bench/analyze.py MODEL [--lengths think] [--rows 1000] [--num_proc 2] [--repeats 3]      speed
    python bench/analyze.py MODEL --memory 10000 100000        peak memory and CPU, Dolci-Instruct's lengths over 8

MODEL is a folder or Hub id with a tokenizer and a chat template. The ways alternate in one run; the figure is the
median of wall times. CPU seconds, children included, say the same on a machine that others use too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics  # some 700 kB of English that comes with Python

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import psutil
from datasets import Dataset, load_from_disk
from transformers import AutoTokenizer

from bench.dolci_lengths import rows
from sfm_dpo.common.files import PROJECT
from sfm_dpo.data.tokenization import tokenize_pairs

SCRIPT = PROJECT / "scripts" / "analyze_dataset.py"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", choices=["think", "instruct"], default="think")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--num_proc", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=int, nargs="+", metavar="ROWS")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    words = " ".join(topics.values()).split()
    ids = tokenizer([" " + word for word in words], add_special_tokens=False)["input_ids"]
    words = [word for word, i in zip(words, ids, strict=True) if len(i) == 1]
    if args.memory:
        measure_memory(args, words)
    else:
        measure_speed(args, tokenizer, words)
    return 0


def measure_speed(args: argparse.Namespace, tokenizer, words: list[str]) -> None:
    pairs = [
        row | {"prompt": [{"role": "user", "content": row["prompt"]}], "source": "bench"}
        for row in rows(args.lengths, args.rows, words, overhead=(30, 2))
    ]
    folder = tempfile.TemporaryDirectory()
    Dataset.from_list(pairs).save_to_disk(folder.name)
    dataset = load_from_disk(folder.name)  # as load_pairs gives it
    template = tokenizer.apply_chat_template
    texts = []
    for row in pairs:
        texts += [template(row["prompt"], tokenize=False, add_generation_prompt=True)]
        texts += [template(row["prompt"] + row[side], tokenize=False) for side in ("chosen", "rejected")]

    def one_row_at_a_time():  # as the first system counted: prompt, chosen, rejected, and prompt + longer response
        for row in pairs:
            sides = [row["prompt"] + row[side] for side in ("chosen", "rejected")]
            counts = [len(template(row["prompt"], add_generation_prompt=True, return_dict=False))]
            counts += [len(template(side, return_dict=False)) for side in sides]
            len(template(sides[0 if counts[1] >= counts[2] else 1], return_dict=False))

    def encode_batch():
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)

    token_counts = []

    def this_project():
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokens, _ = tokenize_pairs(dataset, tokenizer, None, None, args.num_proc)
        token_counts.append(int(sum(sum(tokens[f"{name}_length"]) for name in ("prompt", "chosen", "rejected"))))
        tokens.cleanup_cache_files()
        for file in tokens.cache_files:
            Path(file["filename"]).unlink(missing_ok=True)

    ways = {f.__name__: f for f in (one_row_at_a_time, encode_batch, this_project)}
    seconds: dict[str, list] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():
            start, used = time.perf_counter(), sum(os.times()[:4])
            way()
            seconds[name].append((time.perf_counter() - start, sum(os.times()[:4]) - used))
            print(f"  {name:<18} {seconds[name][-1][0]:7.2f} s, {seconds[name][-1][1]:7.2f} CPU s", flush=True)
    wall = {name: statistics.median(s for s, _ in runs) for name, runs in seconds.items()}
    cpu = {name: statistics.median(c for _, c in runs) for name, runs in seconds.items()}
    mine, cores = wall["this_project"], len(os.sched_getaffinity(0))
    print(f"{args.rows} rows, {token_counts[-1]:,} tokens, {args.num_proc} processes, {cores} cores")
    print(f"  {args.rows / mine:,.1f} rows/s; {cpu['this_project'] / args.rows * 1000:.1f} CPU ms a row")
    for other in ("one_row_at_a_time", "encode_batch"):
        print(f"  {wall[other] / mine:.2f} times {other} by wall time, {cpu[other] / cpu['this_project']:.2f} by CPU")


def measure_memory(args: argparse.Namespace, words: list[str]) -> None:
    """Prints the peak private memory of the command and its workers together, sampled; file cache is not counted."""
    for n in args.memory:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pairs.jsonl"
            with file.open("w") as out:
                for row in rows("instruct", n, words, overhead=(30, 2), divide=8):
                    out.write(json.dumps(row) + "\n")
            command = [sys.executable, str(SCRIPT), str(file), "--model_name_or_path"]
            command += [args.model, "--dataset_num_proc", str(args.num_proc)]
            start, used, peak = time.perf_counter(), sum(os.times()[2:4]), 0
            child = subprocess.Popen(
                command, env=os.environ | {"HF_HOME": folder}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            while child.poll() is None:
                peak = max(peak, private_bytes(child.pid))
                time.sleep(0.2)
            took, used, size = time.perf_counter() - start, sum(os.times()[2:4]) - used, file.stat().st_size
        cost = f"peak {peak / 2**30:.2f} GiB in {took:,.0f} s, {used:,.0f} CPU s"
        print(f"{n:,} rows, {size / 2**20:,.0f} MiB of JSON: {cost}", flush=True)


def private_bytes(pid: int) -> int:
    """Memory of a process and its descendants without files and shared memory (RssAnon); 0 once it has ended."""
    try:
        root = psutil.Process(pid)
        sizes = [process.memory_info() for process in (root, *root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    return sum(size.rss - size.shared for size in sizes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
