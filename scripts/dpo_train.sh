#!/usr/bin/env bash
# DPO on Dolci-Think (recipes/think.yaml): 1 node with 4 GPUs, output in outputs/dpo, log in logs/dpo-train-JOB.out.
#
#   sbatch scripts/dpo_train.sh                                                   from the project folder
#   sbatch scripts/dpo_train.sh --learning_rate 5e-7 --output_dir outputs/lr5e-7  overrides reach train_dpo.py
#   sbatch scripts/dpo_train.sh --config recipes/mine.yaml                        another recipe
#   sbatch --nodes=2 --gpus-per-node=8 --time=12:00:00 scripts/dpo_train.sh       Slurm's options come first
#   LAUNCH=cpu sbatch --gpus-per-node=0 --mem=16G scripts/dpo_train.sh ...        dry run without GPUs
#
# Account and partition: --account=A --partition=P after sbatch, or SBATCH_ACCOUNT and SBATCH_PARTITION in your shell.
# Variables read from the environment: see scripts/common.sh. Without Slurm: accelerate launch, as recipes/think.yaml shows.
#
#SBATCH --job-name=dpo-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=500G
#SBATCH --time=24:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@600

cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this file from its spool folder
# shellcheck source=scripts/common.sh
source scripts/common.sh 2>/dev/null ||
    { echo "error: $PWD is not the project folder; cd there and run: sbatch scripts/dpo_train.sh" >&2; exit 2; }
run_dpo recipes/think.yaml "$@"
