#!/usr/bin/env python
"""How long a second start takes to its first step with many tokenised pairs, against one with few.

python bench/startup.py --pairs 100000     (2 cores: some ten minutes, nearly all of it the first start)

A tiny random model and pairs of Dolci-Think lengths divided by 16. The first start tokenises and computes the
reference log-probs; the second finds both on disk, and what it takes longer than a second start with 64 pairs is the
price of the data: reading, hashing, lengths, sampler.
"""

import argparse
import json
import os
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import sfm_dpo

sfm_dpo.setup()

import dolci_lengths

from tests.tiny_models import tiny_model, tiny_tokenizer

FIELDS = {
    "max_steps": 1,
    "global_batch_size": 8,
    "per_device_train_batch_size": 4,
    "max_length": 1024,
    "max_prompt_length": 512,
    "logging_steps": 1,
    "padding_free": "true",
    "precompute_ref_log_probs": "true",
    "train_sampling_strategy": "batch_rebalance",
    "preflight": "warn",  # from the cached log-probs of all pairs; random weights find every answer impossible
    "guard": "warn",
    "dataset_num_proc": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        tiny_model("llama", **shape, max_position_embeddings=1024).save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        seconds = {}
        for pairs in (64, options.pairs):
            with (folder / f"{pairs}.jsonl").open("w") as file:
                for row in dolci_lengths.rows("think", pairs, list(string.ascii_lowercase), divide=32):
                    file.write(json.dumps(row) + "\n")
            for number in ("first", "second"):
                taken = seconds[pairs, number] = start(folder, pairs, number)
                print(f"{pairs:>9,} pairs, {number} start: first step after {taken:.1f} s", flush=True)
        extra = seconds[options.pairs, "second"] - seconds[64, "second"]
        print(f"a second start with {options.pairs:,} pairs takes {extra:.1f} s more than one with 64")
    return 0


def start(folder: Path, pairs: int, number: str) -> float:
    """Seconds from the command to the line of the first step."""
    fields = FIELDS | {"model_name_or_path": folder / "model", "dataset_name": folder / f"{pairs}.jsonl"}
    fields |= {"output_dir": folder / f"{pairs}-{number}"}
    command = [sys.executable, ROOT / "train_dpo.py", *(p for k, v in fields.items() for p in (f"--{k}", v))]
    env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    env |= {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    begin, taken, lines = time.monotonic(), None, []
    with subprocess.Popen(list(map(str, command)), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        for line in run.stdout or ():
            lines.append(line.decode(errors="replace"))
            if taken is None and lines[-1].startswith("step 1/"):
                taken = time.monotonic() - begin
    if taken is None or run.returncode:
        sys.exit(f"the run failed:\n{''.join(lines)[-4000:]}")
    return taken


if __name__ == "__main__":
    sys.exit(main())
