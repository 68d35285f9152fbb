#!/usr/bin/env bash
# DPO on Dolci-Instruct (recipes/instruct.yaml): 1 node with 4 GPUs, output in outputs/dpo-instruct,
# log in logs/dpo-instruct-train-JOB.out.
#
#   sbatch scripts/dpo_instruct_train.sh --learning_rate 5e-7      from the project folder; more as in dpo_train.sh
#
#SBATCH --job-name=dpo-instruct-train
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
    { echo "error: $PWD is not the project folder; cd there and run: sbatch scripts/dpo_instruct_train.sh" >&2; exit 2; }
run_dpo recipes/instruct.yaml "$@"
