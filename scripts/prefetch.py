#!/usr/bin/env python
"""Downloads a recipe's model and pairs into HF_HOME, and tokenises the pairs. Run it on a node with a network.

    python scripts/prefetch.py --config recipes/think.yaml [--download_only] [--field value ...]

Compute nodes can then run with HF_HUB_OFFLINE=1. Where login nodes must not compute, --download_only leaves the
tokenising to a CPU node: sbatch scripts/prepare.sh prefetch.py --config recipes/think.yaml
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
from huggingface_hub import snapshot_download
from trl.scripts.utils import DatasetConfig

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.errors import user_input
from sfm_dpo.config.checks import read_eval_sets
from sfm_dpo.config.fields import parse_config
from sfm_dpo.data.preferences import list_sources
from sfm_dpo.data.sources import explain_cache_errors, load_rows
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.model.loading import HUB_FILES, find_base


@command
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--download_only", action="store_true", help="do not tokenise the pairs")
    options, fields = parser.parse_known_args(argv or ["--help"])
    config = parse_config(fields, training=False)
    for part in config.parts:
        name = part.model.model_name_or_path
        remedy = "a gated or private model needs HF_TOKEN"
        with user_input(f"{part.model_field} {name}: cannot be downloaded", remedy), explain_cache_errors():
            name, revision = find_base(name, part.revision)  # which downloads an adapter
            if Path(name).is_dir():
                continue
            files = [*HUB_FILES, *(["*.py"] if config.train.trust_remote_code else [])]
            folder = snapshot_download(name, revision=revision, allow_patterns=files)
        print(f"model {name}: {folder}", flush=True)
    if options.download_only:
        held_out = [DatasetConfig(**entry) for entry in read_eval_sets(config.train.eval_datasets).values()]
        for entry in [*list_sources(config), *held_out]:
            print(f"data {entry.path}: {len(load_rows(entry)):,} rows", flush=True)
        return
    pairs = load_token_pairs(config, load_tokenizer(config))
    print(f"data\n{pairs.table()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
