#!/usr/bin/env bash
# Evaluates a run or checkpoint on one GPU (docs/evaluation.md), log in logs/evaluate-JOB.out.
#
#   sbatch scripts/evaluate.sh outputs/dpo --tasks ifeval gsm8k
#   eval_command: sbatch scripts/evaluate.sh {checkpoint} --tasks ifeval gsm8k --out {out}       in a recipe
#   LAUNCH=cpu sbatch --gpus-per-node=0 scripts/evaluate.sh ...          on a CPU node
#
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=128G
#SBATCH --time=8:00:00
#SBATCH --output=logs/%x-%j.out

cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this file from its spool folder
# shellcheck source=scripts/common.sh
source scripts/common.sh 2>/dev/null ||
    { echo "error: $PWD is not the project folder; cd there and run: sbatch scripts/evaluate.sh" >&2; exit 2; }
use_environment
run_command python scripts/evaluate.py "$@"
