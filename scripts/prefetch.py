#!/usr/bin/env python
"""Downloads a recipe's model and pairs into HF_HOME, and tokenises the pairs. Run it on a node with a network.

    python scripts/prefetch.py --config recipes/think.yaml [--field value ...]

Compute nodes can then run with HF_HUB_OFFLINE=1.
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
from huggingface_hub import snapshot_download

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.errors import user_input
from sfm_dpo.config import parse_config
from sfm_dpo.data.sources import explain_cache_errors
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer

# Weights only as safetensors, and the other files that AutoModel and AutoTokenizer read
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]


@command
def main(argv: list[str]) -> None:
    _, fields = Arguments(description=__doc__).parse_known_args(argv or ["--help"])
    config = parse_config(fields, training=False)
    for part in config.parts:
        name = part.model.model_name_or_path
        if not Path(name).is_dir():
            remedy = "a gated or private model needs HF_TOKEN"
            with user_input(f"{part.model_field} {name}: cannot be downloaded", remedy), explain_cache_errors():
                folder = snapshot_download(name, revision=part.revision, allow_patterns=MODEL_FILES)
            print(f"model {name}: {folder}", flush=True)
    pairs = load_token_pairs(config, load_tokenizer(config))
    print(f"data\n{pairs.table()}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
