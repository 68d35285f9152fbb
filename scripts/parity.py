#!/usr/bin/env python
"""Compares code paths on one batch with the same weights, and tells rounding differences from bugs.

    python scripts/parity.py --config recipes/think.yaml [--variants padded,packed,bf16,...] [--pairs 4]

A variant is one word, or several joined by + (packed+bf16): eager, padded (SDPA), packed, shared (packed, prefix
sharing), batch_1 (one pair per forward), bf16, compile. Runs in one process; fp32 weights and gradients must fit.
Exit codes: 0 all rounding, 1 a bug, 2 an error. docs/reproducibility.md explains the rule.
"""

import os
import sys

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.distributed import first_gpu

os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu()


from sfm_dpo.common.cli import Arguments, command, new_file, number
from sfm_dpo.common.files import write_json
from sfm_dpo.compare.parity import DEFAULT_VARIANTS, format_parity, run_parity


@command
def main(argv: list[str]) -> int:
    own = Arguments(description=__doc__)
    own.add_argument("--variants", default=",".join(DEFAULT_VARIANTS))
    own.add_argument("--pairs", type=number(int, 1), default=4)
    own.add_argument("--json", type=new_file)
    ours, argv = own.parse_known_args(argv or ["--help"])
    result = run_parity(argv, ours.variants.split(","), ours.pairs)
    print(format_parity(result))
    if ours.json:
        write_json(ours.json, result)
    return int(any(row["verdict"] == "bug" for row in result["variants"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
