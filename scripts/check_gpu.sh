#!/usr/bin/env bash
# Checks on one node that training is correct and fast on this cluster; prints a line after each check (docs/quickstart.md).
#
#   sbatch scripts/check_gpu.sh                                 with recipes/think.yaml
#   sbatch scripts/check_gpu.sh --config recipes/tulu3_8b.yaml  with the model and the lengths of another recipe
#   LAUNCH=cpu sbatch --gpus-per-node=0 --mem=16G scripts/check_gpu.sh    a dry run on two CPU processes, after make demo
#
# Account, partition and variables: as for scripts/dpo_train.sh. Results: outputs/check-gpu, log in logs/check-gpu-JOB.out.
#
#SBATCH --job-name=check-gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=500G
#SBATCH --time=1:30:00
#SBATCH --output=logs/%x-%j.out

cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this file from its spool folder
# shellcheck source=scripts/common.sh
source scripts/common.sh 2>/dev/null ||
    { echo "error: $PWD is not the project folder; cd there and run: sbatch scripts/check_gpu.sh" >&2; exit 2; }
use_environment
count_processes
run_command python scripts/check_gpu.py --processes "$per_node" "$@"
