#!/usr/bin/env python
"""Checks whether DPO can work with this model on these pairs, from the data and the base model; nothing is trained.

    python scripts/preflight.py --config recipes/think.yaml [--field value ...] [--json FILE]

It reads `preflight_samples` pairs or two global batches, whichever is more.
Exit codes: 0 go or caution, 2 wrong configuration, 3 no-go.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
import torch

import train_dpo
from sfm_dpo.common.cli import Arguments, command, new_file
from sfm_dpo.config import parse_config
from sfm_dpo.health.preflight import PREFLIGHT


@command
def main(argv: list[str]) -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("--json", type=new_file)
    options, fields = parser.parse_known_args(argv or ["--help"])
    args = parse_config(fields, training=False).train
    samples = max(args.preflight_samples, 2 * args.global_batch_size)  # some pairs may be too long
    fields += ["--max_samples", str(min(samples, args.max_samples or samples)), "--eval_fraction", "0"]
    fields += ["--precompute_ref_log_probs", "true", "--preflight", "abort", "--preflight_only", "true"]
    # without held-out pairs these would be refused
    fields += ["--guard_generations", "0", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    fields += ["--metric_for_best_model="]
    # forwards alone, of one process, fit where training does not
    fields += ["--fit_memory", "false", "--per_device_train_batch_size", "1"]
    if not torch.cuda.is_available():
        fields += ["--bf16", "false"]
    fields += ["--report_to", "none", "--push_to_hub", "false", "--torch_compile", "false"]
    with tempfile.TemporaryDirectory() as folder:
        code = train_dpo.main([*fields, "--output_dir", f"{folder}/run"])
        result = Path(folder, "run", PREFLIGHT)
        if options.json and result.is_file():
            shutil.copy(result, options.json)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
