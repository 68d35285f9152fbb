#!/usr/bin/env python
"""Evaluates a trained model and its base: benchmarks of lm-eval.

    python scripts/evaluate.py outputs/dpo --tasks ifeval gsm8k --limit 200
    python scripts/evaluate.py outputs/dpo                                collects the results of eval_command
    sbatch scripts/evaluate.sh outputs/dpo --tasks ifeval                 in a job with one GPU

The results go into evaluation.json, the report and the model card. Needs requirements-eval.txt (docs/evaluation.md).
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command, new_file, number, reads_runs
from sfm_dpo.evaluation.lm_eval import evaluate_run


@command
@reads_runs
def main(argv: list[str]) -> None:
    parser = Arguments(prog="evaluate.py", description=__doc__)
    parser.add_argument("run", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument("--tasks", nargs="+", default=[], help="lm-eval task names, or .yaml files")
    parser.add_argument("--out", metavar="FILE", type=new_file, help="write a checkpoint's metrics for eval_command")
    parser.add_argument("--limit", type=number(int, 1), help="samples per task; default: all")
    parser.add_argument("--num_fewshot", type=number(int, 0), help="default: the task's setting")
    parser.add_argument("--batch_size", type=number(int, 1), default=8)
    parser.add_argument("--backend", choices=("hf", "vllm"), default="hf", help="of lm-eval; vllm is faster")
    parser.add_argument("--no_chat_template", dest="apply_chat_template", action="store_false", help="plain prompts")
    parser.add_argument("--model_args", nargs="+", default=[], metavar="KEY=VALUE", help="for lm-eval's model")
    options = vars(parser.parse_args(argv))
    options["model_args"] = ",".join(options["model_args"])
    print(evaluate_run(options.pop("run"), **options))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
