# shellcheck shell=bash
# Copy this to scripts/site.sh, which git ignores, and keep what your cluster needs. The batch scripts source it in the job
# and again on every node: set values, do not append to them. Defaults of sbatch need `source scripts/site.sh` before it:
# export SBATCH_ACCOUNT=my-project SBATCH_PARTITION=gpu
[[ -n ${SLURM_JOB_ID:-} ]] || return 0 # what follows is for the nodes
# export VENV=/projects/my-project/venv                  # an environment other than .venv
# source "$HOME/miniforge3/bin/activate" dpo || return   # or conda's, where there is no .venv
# Containers (pyxis, or --environment of Alps). The batch script checks the recipe outside of it, so .venv must work there
# SRUN_OPTIONS="--container-image=/path/to/image.sqsh --container-mounts=/projects"
# Slingshot with GH200 (Isambard-AI), for jobs of several nodes: modules and variables of the first users' scripts
# (GeodesicResearch/sfm-post-training 933f2c5). The plugin aws-ofi-nccl must be 1.17 or newer: 1.8.1 deadlocks. Preload no
# NCCL older than PyTorch's own (`python -c "import torch; print(torch.cuda.nccl.version())"`), which may lack functions
# module load PrgEnv-cray cuda/12.6 brics/nccl || return
# export LD_PRELOAD="$NCCL_ROOT/lib/libnccl.so" NCCL_NET="AWS Libfabric" FI_PROVIDER=cxi
# export NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0 NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=PHB
# export FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DISABLE_HOST_REGISTER=1
# InfiniBand (`ibstat -l`, `ip -br address`)
# export NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
