#!/usr/bin/env python
"""Helps to choose max_length: lengths of the pairs, what each max_length keeps and costs, problems. Uses no GPU.

    python scripts/analyze_dataset.py allenai/Dolci-Think-DPO-7B --model_name_or_path MODEL --max_samples 5000
    python scripts/analyze_dataset.py --config recipes/think.yaml --json lengths.json --plot lengths.png

Any field of a recipe can be given as an option. docs/data.md explains the output. --json writes: `dataset`, `model`,
`rows`, `usable`, `pairs`; `dropped`, rows by reason; `percentiles` of `total` (prompt + longer response),
`prompt`, `chosen`, `rejected` in tokens; `candidates`, for each max_length its max_prompt_length (null: not needed)
and what both keep, drop (`equal`: answers equal once cut) and cost; `recommendation`, the same with its `reason`;
`control_tokens`, `length_bias` and `findings`.
"""

import os
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, new_file, number
from sfm_dpo.common.distributed import CPU_ONLY
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import write_json

PLOTS = (".png", ".svg", ".pdf")


@command
def main(argv: list[str]) -> None:
    share = number(float, 0, 1)
    parser = Arguments(usage="analyze_dataset.py [DATASET] [options]", description=__doc__)
    parser.add_argument("--min_coverage", type=share, default=0.95, help="share of pairs left untruncated (0.95)")
    parser.add_argument("--min_tokens_kept", type=share, default=0.9, help="share of response tokens kept (0.9)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all results, for programs")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="write the plot as .png, .svg or .pdf")
    parser.add_argument("--dropped", type=new_file, metavar="FILE", help="write each unusable row as a JSON line")
    if argv and not argv[0].startswith("-"):
        argv = ["--dataset_name", *argv]
    args, fields = parser.parse_known_args(argv or ["--help"])  # answers --help before the slow imports

    if args.plot and args.plot.suffix not in PLOTS:
        raise UserError(f"--plot {args.plot}: unknown format; choose one of {', '.join(PLOTS)}")
    os.environ.update(CPU_ONLY)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes instead; datasets would turn it off with a warning
    from sfm_dpo.config.fields import parse_config
    from sfm_dpo.data.preferences import list_sources
    from sfm_dpo.planning.dataset import analyze_dataset, draw_lengths, format_analysis

    processes = f"--dataset_num_proc={len(os.sched_getaffinity(0))}"
    config = parse_config([processes, *fields], training=False)  # the last one counts
    places = {Path(entry.path).expanduser().resolve() for entry in list_sources(config)}
    for file in filter(None, (args.json, args.dropped)):
        if not places.isdisjoint((file.resolve(), *file.resolve().parents)):
            raise UserError(f"{file}: is the dataset itself, or in its folder; choose another file")
    result = analyze_dataset(config, args.min_coverage, args.min_tokens_kept, args.dropped)
    print(format_analysis(result))
    if args.json:
        write_json(args.json, result)
    if args.plot:
        draw_lengths(result, args.plot)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
