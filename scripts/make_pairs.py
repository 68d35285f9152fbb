#!/usr/bin/env python
"""Makes preference pairs from scored or ranked answers, as JSON Lines for dataset_name.

    python scripts/make_pairs.py openbmb/UltraFeedback --by score pairs.jsonl

docs/data.md lists the supported sets. Prompts without a preferred answer are left out and counted.
"""

import json
import sys

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, new_file, number
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_atomically
from sfm_dpo.data.scored_formats import pair_rows
from sfm_dpo.data.sources import check_output, load_rows


@command
def main(argv: list[str]) -> None:
    parser = Arguments(prog="make_pairs.py", description=__doc__)
    parser.add_argument("dataset", metavar="DATASET")
    parser.add_argument("out", metavar="OUT.jsonl", type=new_file, help="file to write")
    parser.add_argument("--by", required=True, help='"score" for the overall score, or the name of another score')
    parser.add_argument("--score_margin", type=number(float, 0), default=0.0, help="least score difference of a pair")
    options = parser.parse_args(argv)

    check_output(options.out, options.dataset)
    rows = load_rows(options.dataset)
    pairs = list(pair_rows(rows, options.dataset, options.by, options.score_margin))
    lines = [json.dumps(pair, default=str) + "\n" for pair in pairs if pair]
    if not lines:
        raise UserError(
            f"--by {options.by}: no prompt of {options.dataset} has answers that differ; use another score"
        )
    write_atomically(options.out, "".join(lines))
    ties = pairs.count(None)
    print(f"{options.out}: {len(lines):,} pairs; {ties:,} prompts have no preferred answer and are left out")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
