# shellcheck shell=bash
# Copy this to scripts/site.sh, which git ignores, and keep what your cluster needs. The batch scripts source it in the job
# and again on every node: set values, do not append to them. Defaults of sbatch need `source scripts/site.sh` before it:
# export SBATCH_ACCOUNT=my-project SBATCH_PARTITION=gpu
[[ -n ${SLURM_JOB_ID:-} ]] || return 0 # what follows is for the nodes
# export VENV=/projects/my-project/venv                  # an environment other than .venv
# source "$HOME/miniforge3/bin/activate" dpo || return   # or conda's, where there is no .venv
# Containers (pyxis, or --environment of Alps). The batch script checks the recipe outside of it, so .venv must work there
# SRUN_OPTIONS="--container-image=/path/to/image.sqsh --container-mounts=/projects"
# Slingshot with GH200 (Isambard-AI): the cluster's NCCL over libfabric; `module show brics/nccl` has its path. Its plugin
# aws-ofi-nccl must be 1.17 or newer: 1.8.1 deadlocks
# module load cuda/12.6 brics/nccl || return
# export LD_PRELOAD=/path/to/libnccl.so.2 NCCL_NET="AWS Libfabric" FI_PROVIDER=cxi
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0
# InfiniBand (`ibstat -l`, `ip -br address`)
# export NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
