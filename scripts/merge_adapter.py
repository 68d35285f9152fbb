#!/usr/bin/env python
"""Merges the adapter of a LoRA run into its base model, for another run, a server or other tools.

python scripts/merge_adapter.py outputs/lora outputs/lora-merged
python train_dpo.py --config R --model_name_or_path outputs/lora-merged    # a second round
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, reads_runs
from sfm_dpo.run.saved_model import find_model, merge_adapter


@command
@reads_runs
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("model", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write the merged model")
    options = parser.parse_args(argv)
    merge_adapter(find_model(options.model), options.folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
