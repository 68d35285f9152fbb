#!/usr/bin/env python
"""Checks whether DPO can work with this model on these pairs, from the data and the base model; nothing is trained.

    python scripts/preflight.py --config recipes/think.yaml [--field value ...]

It reads `preflight_samples` pairs or two global batches, whichever is more, and keeps nothing; `train_dpo.py
--preflight_only true` writes preflight.json.
Exit codes: 0 go or caution, 2 wrong configuration, 3 no-go.
"""

import os
import sys
import tempfile
from typing import Any

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.distributed import first_gpu

os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu()

import torch

import train_dpo
from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.config.effects import short_run
from sfm_dpo.config.fields import parse_config


@command
def main(argv: list[str]) -> int:
    _, fields = Arguments(description=__doc__).parse_known_args(argv or ["--help"])
    args = parse_config(short_run(fields), training=False).train
    samples = max(args.preflight_samples, 2 * args.global_batch_size)  # some pairs may be too long
    changed: dict[str, Any] = {"max_samples": min(samples, args.max_samples or samples)}
    changed |= {"precompute_ref_log_probs": True, "preflight": "abort", "preflight_only": True}
    # forwards alone, of one process, fit where training does not
    changed |= {"per_device_train_batch_size": 1, "gradient_checkpointing": True}
    changed |= {"torch_compile": False, "torch_compile_backend": "", "torch_compile_mode": ""}  # which set it
    if not torch.cuda.is_available():
        changed["bf16"] = False
    with tempfile.TemporaryDirectory() as folder:
        return train_dpo.main(short_run(fields, output_dir=f"{folder}/run", **changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
