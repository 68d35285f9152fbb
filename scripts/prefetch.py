#!/usr/bin/env python
"""Fetches what a recipe needs into HF_HOME, on a login node where there is a network: model, pairs, token ids.

    python scripts/prefetch.py --config recipes/think.yaml [--field value ...]

Compute nodes can then run with HF_HUB_OFFLINE=1. Takes the recipe's fields as train_dpo.py does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo  # noqa: F401  (first: it reads .env)

# isort: split
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer

# Weights in safetensors alone, and what AutoModel and AutoTokenizer read beside them.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    try:
        config = parse_config(argv, training=False)
        name = config.model.model_name_or_path
        if not Path(name).is_dir():
            print(f"model {name}: {fetch(name, config.model.model_revision)}", flush=True)
        pairs, _ = load_token_pairs(config, load_tokenizer(config))
        print(f"data\n{pairs.table()}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def fetch(name: str, revision: str | None) -> str:
    """Downloads a model repository; returns its folder."""
    try:
        return snapshot_download(name, revision=revision, allow_patterns=MODEL_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(
            f"model_name_or_path {name}: cannot be fetched (a gated or private one needs HF_TOKEN): {error}"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
