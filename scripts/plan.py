#!/usr/bin/env python
"""Predicts memory, batch size, hours and disk of a recipe before submission. Needs no weights and no GPU.

    python scripts/plan.py --config recipes/think.yaml                                  # 4 B200
    python scripts/plan.py --config R --gpu h100 --num_gpus 8 --num_nodes 4 --mfu 0.4
    python scripts/plan.py --config R --model_name_or_path FOLDER_WITH_CONFIG_JSON --lengths lengths.json

Other options are train_dpo.py's. docs/memory-and-speed.md explains the numbers.
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, new_file, number
from sfm_dpo.common.files import write_json


@command
def main(argv: list[str]) -> None:
    own = Arguments(description=__doc__)
    own.add_argument("--gpu", default="b200", help="b200, h100, ... (docs/memory-and-speed.md)")
    own.add_argument("--num_gpus", type=number(int, 1), default=4)
    own.add_argument("--num_nodes", type=number(int, 1), default=1)
    own.add_argument("--mfu", type=number(float, 0.001, 1), help="perf/mfu of a run there; default: 0.37")
    own.add_argument("--lengths", type=Path, help="JSON of analyze_dataset.py; default: read the dataset")
    own.add_argument("--pairs", type=number(int, 1), help="plan for this many pairs")
    own.add_argument("--json", type=new_file)
    ours, fields = own.parse_known_args(argv or ["--help"])
    import numpy as np

    from sfm_dpo.config.checks import check_known
    from sfm_dpo.config.effects import short_run
    from sfm_dpo.config.fields import parse_config
    from sfm_dpo.data.lengths import Lengths
    from sfm_dpo.data.tokenization import load_token_pairs, load_tokenizer
    from sfm_dpo.model.loading import load_model_config
    from sfm_dpo.planning.run_plan import GPU_MEMORY, MFU, Planner, format_plan, read_lengths

    gpu = ours.gpu.upper()
    check_known("--gpu", gpu, GPU_MEMORY)
    gpus = ours.num_gpus * ours.num_nodes
    options = short_run(fields, eval_fraction=None)  # held-out pairs are not trained on
    config = parse_config(options, world_size=gpus, training=False)
    shape = load_model_config(config)
    if ours.lengths:
        lengths = read_lengths(ours.lengths)
        drawn = min(len(lengths), config.train.max_samples or len(lengths))
        lengths = lengths.select(np.arange(round(drawn * (1 - config.train.eval_fraction))))
    else:
        lengths = Lengths.of(load_token_pairs(config, load_tokenizer(config)).train)
    if ours.pairs:
        lengths = lengths.select(np.arange(ours.pairs) % len(lengths))
    plan = Planner(config, shape, lengths, gpu, gpus).plan(ours.mfu or MFU)
    print(format_plan(plan))
    if ours.json:
        write_json(ours.json, plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
