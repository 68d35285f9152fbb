#!/usr/bin/env bash
# Tokenises or analyses pairs on a CPU node, log in logs/prepare-JOB.out. The arguments are a script and its options.
#
#   sbatch scripts/prepare.sh prefetch.py --config recipes/think.yaml             after prefetch.py --download_only
#   sbatch scripts/prepare.sh analyze_dataset.py --config recipes/think.yaml
#
#SBATCH --job-name=prepare
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=2:00:00
#SBATCH --output=logs/%x-%j.out

cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this file from its spool folder
# shellcheck source=scripts/common.sh
source scripts/common.sh 2>/dev/null ||
    { echo "error: $PWD is not the project folder; cd there and run: sbatch scripts/prepare.sh" >&2; exit 2; }
[[ -f scripts/${1:-} ]] || fail "'${1:-}': no file in scripts; give prefetch.py or analyze_dataset.py, then its options"
use_environment
hide_gpus
run_command python "scripts/$1" "${@:2}"
