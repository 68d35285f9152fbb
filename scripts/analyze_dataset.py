#!/usr/bin/env python
"""Chooses max_length: how long the pairs are, what each max_length keeps and costs, what looks wrong. No GPU is used.

    python scripts/analyze_dataset.py                                   # allenai/Dolci-Instruct-DPO, SFM instruct
    python scripts/analyze_dataset.py allenai/Dolci-Think-DPO-7B --max_samples 5000
    python scripts/analyze_dataset.py pairs.jsonl --model_name_or_path my/model --html lengths.html
    python scripts/analyze_dataset.py --config recipes/think.yaml --json lengths.json --plot lengths.png
    python scripts/analyze_dataset.py --config recipes/think.yaml --gpu b200 --num_gpus 4
    python scripts/analyze_dataset.py pairs.jsonl --against gsm8k.jsonl:question --json found.json

Run it with the recipe, on all pairs, and the training run finds their token ids in the cache. All other fields of a
recipe can be given too; max_prompt_length is applied where it is given. docs/lengths.md and
docs/filters.md explain the output.
"""

import os
import sys

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, new_figure, new_file, number
from sfm_dpo.common.files import write_json

DATASET, MODEL = "allenai/Dolci-Instruct-DPO", "geodesic-research/sfm-sft_dolci_instruct_unfiltered"


@command
def main(argv: list[str]) -> int:
    share = number(float, 0, 1)
    parser = Arguments(usage="analyze_dataset.py [DATASET] [options]", description=__doc__)
    parser.add_argument("--config", metavar="RECIPE", help="a recipe; DATASET and options override it")
    parser.add_argument(
        "--model_name_or_path", metavar="M", help=f"tokenizer and chat template (default: the recipe's, or {MODEL})"
    )
    parser.add_argument("--max_samples", metavar="N", help="a random sample of so many pairs, drawn with --seed")
    parser.add_argument("--dataset_num_proc", metavar="N", help="processes (default: one a core)")
    parser.add_argument("--min_coverage", type=share, default=0.95, help="pairs to leave whole (default 0.95)")
    parser.add_argument("--min_tokens_kept", type=share, default=0.9, help="response tokens to keep (default 0.9)")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="SET",
        help="evaluation sets, FILE_OR_DATASET[@split][:column]: what is in both",
    )
    parser.add_argument("--ngram", type=number(int, 1), default=13, help="words in common that count (default 13)")
    parser.add_argument(
        "--gpu", metavar="GPU", help="b200, h100, ...: hours and memory of each max_length (docs/plan.md)"
    )
    parser.add_argument("--num_gpus", type=number(int, 1), default=4, metavar="N", help="GPUs of --gpu (default 4)")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="writes everything, for machines")
    parser.add_argument("--plot", type=new_figure, metavar="FILE", help="writes the picture, .png, .svg or .pdf")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="writes one page with all")
    parser.add_argument("--dropped", type=new_file, metavar="FILE", help="lists the unusable rows, a JSON line each")
    args, fields = parser.parse_known_args(argv)  # answers --help before the slow imports

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes instead; datasets would turn it off with a warning
    from sfm_dpo.common.files import CALIBRATION
    from sfm_dpo.config import parse_config
    from sfm_dpo.planning.dataset import analyze_dataset
    from sfm_dpo.planning.dataset_report import format_analysis, write_page, write_plot
    from sfm_dpo.planning.run_plan import Cluster

    for name in ("config", "model_name_or_path", "max_samples", "dataset_num_proc"):
        if (value := getattr(args, name)) is not None:
            fields.append(f"--{name}={value}")
    config = parse_config(defaults(fields), training=False)
    cluster = Cluster(args.gpu.upper(), args.num_gpus) if args.gpu else None
    if cluster and CALIBRATION.is_file():
        cluster = cluster.calibrated(CALIBRATION)
    result = analyze_dataset(
        config, args.min_coverage, args.min_tokens_kept, args.against, args.ngram, cluster, args.dropped
    )
    print(format_analysis(result))
    if args.json:
        write_json(args.json, result)
    if args.plot:
        write_plot(result, args.plot)
    if args.html:
        write_page(result, args.html)
    return 0


def defaults(fields: list[str]) -> list[str]:
    """Fields for parse_config: DATASET is the word that follows no option; what nobody gave is filled in."""
    words = [
        i
        for i, word in enumerate(fields)
        if word[:1] != "-" and (i == 0 or fields[i - 1][:2] != "--" or "=" in fields[i - 1])
    ]
    fields = list(fields)
    if words:
        fields[words[0]] = f"--dataset_name={fields[words[0]]}"
    given = {word.split("=")[0] for word in fields}
    if "--config" not in given:
        fields += [] if "--dataset_name" in given else [f"--dataset_name={DATASET}"]
        fields += [] if "--model_name_or_path" in given else [f"--model_name_or_path={MODEL}"]
    fields += [] if "--dataset_num_proc" in given else [f"--dataset_num_proc={len(os.sched_getaffinity(0))}"]
    return fields


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
