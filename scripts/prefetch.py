#!/usr/bin/env python
"""Fetches what a recipe needs into HF_HOME, on a login node where there is a network: model, pairs, token ids.

    python scripts/prefetch.py --config recipes/think.yaml [--field value ...]

Compute nodes can then run with HF_HUB_OFFLINE=1. Takes the recipe's fields as train_dpo.py does. On a compute node,
under the launcher that will train, --reference fills the reference cache, and nothing else:

    accelerate launch --config_file accelerate_config.yaml scripts/prefetch.py --config recipes/think.yaml --reference
"""

import logging
import sys
import tempfile
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.distributed import main_process_first
from sfm_dpo.common.errors import UserError
from sfm_dpo.config import parse_config
from sfm_dpo.data.sources import explain_cache_errors
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer

log = logging.getLogger("sfm_dpo")

# Weights in safetensors alone, and what AutoModel and AutoTokenizer read beside them.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]


@command
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("--reference", action="store_true", help="compute the reference log-probs of the pairs")
    options, fields = parser.parse_known_args(argv or ["--help"])
    if options.reference:
        return fill_reference_cache(fields)
    config = parse_config(fields, training=False)
    name = config.model.model_name_or_path
    if not Path(name).is_dir():
        try:
            with explain_cache_errors():
                folder = snapshot_download(name, revision=config.model.model_revision, allow_patterns=MODEL_FILES)
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            remedy = "a gated or private one needs HF_TOKEN"
            raise UserError(f"model_name_or_path {name}: cannot be fetched ({remedy}): {error}") from error
        print(f"model {name}: {folder}", flush=True)
    pairs = load_token_pairs(config, load_tokenizer(config))
    print(f"data\n{pairs.table()}")


def fill_reference_cache(fields: list[str]) -> None:
    """What a training run with these fields would compute before its first step; prints the key of each split."""
    from sfm_dpo.model.sharding import disable_deepspeed_shm  # these take seconds to import
    from sfm_dpo.train.position import Position
    from sfm_dpo.train.reference_cache import add_reference, make_folder, reference_root
    from train_dpo import build_trainer

    disable_deepspeed_shm()
    config = parse_config(fields)
    if not config.train.precompute_ref_log_probs:
        raise UserError(
            "precompute_ref_log_probs False: this run reads no cache; set it true, or leave out --reference"
        )
    main_process_first(lambda: make_folder(reference_root()))
    tokenizer = load_tokenizer(config)
    pairs = main_process_first(lambda: load_token_pairs(config, tokenizer))
    with tempfile.TemporaryDirectory() as config.train.output_dir:
        trainer = build_trainer(config, pairs, tokenizer, None, Position())
        add_reference(trainer)
        for name, facts in trainer.reference_facts.items():
            log.info(f"reference log-probs of the {name} pairs: key {facts['key']}")
        trainer.accelerator.end_training()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
