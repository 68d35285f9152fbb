#!/usr/bin/env python
"""Says whether DPO can work with this model on these pairs: data and base model only, no training, in seconds.

    python scripts/preflight.py --config recipes/think.yaml [--field value ...] [--json FILE]

Takes the recipe's fields as train_dpo.py does, on one GPU or the CPU (there: --bf16 false). Looks at
`preflight_samples` pairs (256), drawn with `seed`. Exit codes: 0 go or caution, 2 wrong configuration, 3 no-go.
"""

import sys
import tempfile

import _setup  # noqa: F401  (first: finds the package, reads .env)
import numpy as np

from sfm_dpo.common.cli import Arguments, command, new_file
from sfm_dpo.common.files import write_json
from sfm_dpo.config import parse_config
from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
from sfm_dpo.health.preflight import check_vocabulary, format_preflight, run_preflight
from sfm_dpo.model.loading import load_model_config
from sfm_dpo.train.position import Position
from train_dpo import build_trainer


@command
def main(argv: list[str]) -> int:
    parser = Arguments(description=__doc__)
    parser.add_argument("--json", type=new_file)
    options, fields = parser.parse_known_args(argv or ["--help"])
    with tempfile.TemporaryDirectory() as folder:  # the trainer wants an output_dir; nothing is kept in it
        result = preflight([*fields, "--output_dir", folder, "--report_to", "none", "--eval_fraction", "0"])
    print(format_preflight(result))
    if options.json:
        write_json(options.json, result)
    return 3 if result["verdict"] == "no-go" else 0


def preflight(fields: list[str]) -> dict:
    """The preflight's verdict on a sample of the recipe's pairs."""
    config = parse_config(fields, world_size=1)
    args = config.train
    model_config = load_model_config(config)
    tokenizer = load_tokenizer(config)
    pairs, _ = load_token_pairs(config, tokenizer)
    check_vocabulary(pairs.train, tokenizer, model_config.get_text_config().vocab_size)
    print(f"data\n{pairs.table()}", flush=True)

    total = len(pairs.train)
    if total < args.global_batch_size:
        print(f"warning: {total} pairs are less than global_batch_size {args.global_batch_size}: nothing to train on")
    sample = np.sort(np.random.default_rng(args.seed).permutation(total)[: args.preflight_samples])
    pairs.train = pairs.train.select(sample)
    args.precompute_ref_log_probs = True  # otherwise TRL loads the model twice
    if args.bf16:
        config.model.dtype = "bfloat16"  # nothing is trained: no master weights
    trainer = build_trainer(config, pairs, tokenizer, None, Position())
    return run_preflight(trainer, config) | {"pairs": f"{len(sample):,} of {total:,}, drawn with seed {args.seed}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
