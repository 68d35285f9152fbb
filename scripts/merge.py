#!/usr/bin/env python
"""Merges the LoRA adapter of a run, or of one of its checkpoints, into its base model.

    python scripts/merge.py outputs/lora --output_dir outputs/merged

The sum is computed in fp32 and saved in the base model's dtype (save_dtype of the run).
"""

import shutil
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, reads_runs
from sfm_dpo.common.errors import UserError
from sfm_dpo.model.loading import find_base, load_model
from sfm_dpo.run.model_files import copy_tokenizer, find_folder, finish_model
from sfm_dpo.run.saved_model import find_model


@command
@reads_runs
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("path", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument("--output_dir", type=Path, required=True, help="a new folder for the merged model")
    options = parser.parse_args(argv)
    adapter = find_model(options.path)
    if not adapter.is_adapter:
        raise UserError(f"{options.path}: holds a whole model, so there is nothing to merge; give a run with use_peft")
    folder = options.output_dir
    if folder.exists():
        raise UserError(f"--output_dir {folder}: exists; choose another, or remove it")
    partial = folder.with_name(f".{folder.name}.partial")  # the folder appears complete or not at all
    shutil.rmtree(partial, ignore_errors=True)  # of a merge that was killed
    load_model(str(adapter.folder), {"dtype": "float32"}).save_pretrained(partial)
    copy_tokenizer(adapter.folder, partial)
    base = find_folder(*find_base(str(adapter.folder), None))
    finish_model(partial, None, base, narrow=adapter.config.get("save_dtype") != "trained")
    partial.rename(folder)
    print(f"{folder}: the base model {adapter.base} with the adapter {adapter.folder}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
