# shellcheck shell=bash
# Functions that the batch scripts share; they source this file in a Slurm job and call `run_dpo RECIPE ARGUMENTS...`.
#
# Variables, from the environment of sbatch:
#   LAUNCH         zero2 (default: accelerate_config.yaml) or a name in configs/accelerate, for instance cpu
#   NUM_GPUS       processes per node; default: the GPUs that Slurm gave the job
#   NUM_PROCESSES  processes per node if LAUNCH starts with cpu; default 2
#   VENV           virtual environment; default: .venv here, otherwise the one active when sbatch was called
#   MAX_REQUEUES   how often a run that stopped on request is requeued; default 20
#   SRUN_OPTIONS   more options of every srun, for instance a container's (set it in scripts/site.sh)
#   SKIP_HEALTHCHECK   1: train without first checking GPUs, disks and network
# Secrets and HF_HOME belong in .env, which train_dpo.py reads itself; nothing here prints or sources it.

set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

run_dpo() {
    local asked=''
    trap 'asked=1' USR1 TERM
    [[ -n ${SLURM_JOB_ID:-} ]] || fail "no Slurm job: run 'sbatch scripts/...', or without Slurm 'accelerate launch'"
    [[ ${MAX_REQUEUES:-20} =~ ^[0-9]+$ ]] || fail "MAX_REQUEUES=$MAX_REQUEUES: give the number of restarts"
    export SLURM_JOB_START_TIME=${SLURM_JOB_START_TIME:-$(date +%s)} # Slurm sets it since 23.02; dates the STOP file
    export SFM_JOB_LOG SFM_GRACE_SECONDS # for status.json, and for a warning if a save takes longer
    SFM_JOB_LOG=$(readlink "/proc/$$/fd/1")
    SFM_GRACE_SECONDS=${SFM_GRACE_SECONDS:-$(sed -n 's/^#SBATCH --signal=B:USR1@//p' "${BASH_SOURCE[-1]}")}
    ((${SLURM_JOB_END_TIME:-9999999999} - SLURM_JOB_START_TIME > ${SFM_GRACE_SECONDS:-0})) ||
        fail "--time: shorter than the $SFM_GRACE_SECONDS s before its end in which the run stops and saves; give more," \
            "or set SFM_GRACE_SECONDS to the seconds of your own --signal"
    use_environment
    count_processes
    first_host
    set -- --config "$@" # the recipe; train_dpo.py uses the last --config, so the user's wins

    # One process reads the configuration before any node starts, so a mistake costs one line and a few seconds.
    local checked code=0 output_dir
    checked=$(python scripts/check_config.py "$((SLURM_JOB_NUM_NODES * per_node))" "$@") || exit
    config_file=$(sed -n 's/^config_file: //p' <<<"$checked")
    output_dir=$(sed -n 's/^output_dir: //p' <<<"$checked")
    if [[ -z $output_dir ]]; then
        echo "$checked" # of --help, or nothing: already done, or done by check_config.py, as it has said
        exit 0
    fi
    local status_before
    status_before=$(cat "$output_dir/status.json" 2>/dev/null) || status_before={}

    say "job $SLURM_JOB_ID (restart ${SLURM_RESTART_COUNT:-0}) on $SLURM_JOB_NODELIST, rendezvous $host:$port"
    say "$SLURM_JOB_NUM_NODES node(s) x $per_node process(es), $config_file, environment $(command -v python)"
    say "train_dpo.py $(printf '%q ' "$@" | sed -E 's/(token[= ])[^ ]+/\1***/g')-> $output_dir"
    # srun stays in the background so that bash can act on signals, which end `wait`.
    check_health "$output_dir" &
    [[ -n $asked ]] || wait $! || code=$?
    if [[ -n $asked ]]; then
        kill $! 2>/dev/null || true
        code=asked
    elif ((code != 0)); then
        code=unhealthy
    else
        trap 'asked=1; say "asked to stop: $output_dir/STOP"; mkdir -p "$output_dir"; touch "$output_dir/STOP"' USR1 TERM
        launch "$output_dir" "$@" &
        asked=1
        while [[ -n $asked ]]; do
            asked=''
            code=0
            wait $! || code=$?
        done
    fi
    trap '' USR1 TERM # too late to stop
    exec python -m sfm_dpo.cluster.after "$output_dir" "$code" <<<"$status_before"
}

say() { echo "[${SLURM_JOB_NAME:-dpo} $(date '+%F %T')] $*"; }

# Loads the cluster's modules and variables (site.sh may use unset variables), then the virtual environment.
use_environment() {
    if [[ -f scripts/site.sh ]]; then
        local mistake code
        mistake=$(bash -n scripts/site.sh 2>&1) || fail "${mistake%%$'\n'*}"
        set +euo pipefail
        trap 'fail "scripts/site.sh: calls exit; use return"' EXIT
        # shellcheck source=scripts/site.example.sh
        source scripts/site.sh
        code=$?
        trap - EXIT
        set -euo pipefail
        ((code == 0)) || fail "scripts/site.sh: returned $code on $(hostname)"
    fi
    local venv=${VENV:-.venv}
    if [[ -x $venv/bin/accelerate ]]; then
        venv=$(cd "$venv" && pwd)
        export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
    elif [[ -n ${VENV:-} ]]; then
        fail "VENV=$VENV: no accelerate in its bin folder; create it with: make setup VENV=$VENV"
    elif ! command -v accelerate >/dev/null; then
        fail "no Python environment: run 'make setup' here, or set VENV to your virtual environment"
    fi
    export PYTHONUNBUFFERED=1
    export SLURM_EXPORT_ENV=ALL # after sbatch --export=LAUNCH=zero3, srun would pass nothing else to the nodes
    # In the home folder, on NFS, compiled kernels of many processes race. Each node chooses, not srun's environment.
    [[ ${TRITON_CACHE_DIR:-} != "${SFM_CACHE:-none}"/* ]] || unset TRITON_CACHE_DIR
    [[ ${TORCHINDUCTOR_CACHE_DIR:-} != "${SFM_CACHE:-none}"/* ]] || unset TORCHINDUCTOR_CACHE_DIR
    local cache=${TMPDIR:-/tmp}/sfm-dpo-$UID
    mkdir -p -m 700 "$cache" 2>/dev/null || true
    [[ -O $cache ]] || cache=$(mktemp -d) # another user made it
    export SFM_CACHE=$cache
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
    [[ ${LAUNCH:-} != cpu* ]] || hide_gpus # again on each node: srun sets CUDA_VISIBLE_DEVICES anew
}

hide_gpus() { export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=; } # CPU_ONLY in sfm_dpo/common/distributed.py

# Sets per_node, the number of processes on each node.
count_processes() {
    per_node=${NUM_GPUS:-${SLURM_GPUS_ON_NODE:-}}
    [[ ${LAUNCH:-} != cpu* ]] || per_node=${NUM_PROCESSES:-2}
    [[ $per_node =~ ^[1-9][0-9]*$ ]] ||
        fail "processes per node is '$per_node': submit with --gpus-per-node=4, or set NUM_GPUS, or LAUNCH=cpu"
    local threads=$((${SLURM_CPUS_PER_TASK:-1} / per_node))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# Sets host and port of the rendezvous, and srun_options: one task per node. All nodes must use the same address, so
# there is no fallback to localhost, which would make each node train alone. The address is the one that Slurm uses.
first_host() {
    local name
    name=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    host=$(scontrol --oneliner show node "$name" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    [[ -n $host ]] || fail "scontrol gives no address for node '$name', the first of $SLURM_JOB_NODELIST"
    port=$((20000 + SLURM_JOB_ID % 10000)) # differs for two jobs on a node; below the ephemeral range
    # shellcheck disable=SC2206
    srun_options=(${SRUN_OPTIONS:-} --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
    # Since 22.05 srun no longer takes this one from the job.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || srun_options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    ((SLURM_JOB_NUM_NODES == 1)) || srun_options+=(--label)
}

# Ends the script with a command on this job's only node: as a step where SRUN_OPTIONS are set, for instance a container.
run_command() {
    # shellcheck disable=SC2206
    local step=(srun ${SRUN_OPTIONS:-} --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
    [[ -n ${SRUN_OPTIONS:-} ]] || step=()
    exec "${step[@]}" "$@"
}

# Checks each node's GPUs, folders and connections in a few minutes at most.
check_health() {
    if [[ ${SKIP_HEALTHCHECK:-} == 1 ]]; then
        say "node check skipped"
        return
    fi
    # Not under torchrun, which makes 1 of every exit code and prints a traceback.
    # shellcheck disable=SC2016
    local on_node='source scripts/common.sh && use_environment
        for ((i = 0; i < LOCAL_WORLD_SIZE; i++)); do
            RANK=$((SLURM_NODEID * LOCAL_WORLD_SIZE + i)) LOCAL_RANK=$i timeout 600 python -m sfm_dpo.cluster.node_check "$@" &
        done
        code=0
        for pid in $(jobs -p); do wait "$pid" || code=$?; done
        exit "$code"'
    export LOCAL_WORLD_SIZE=$per_node WORLD_SIZE=$((SLURM_JOB_NUM_NODES * per_node))
    export MASTER_ADDR=$host MASTER_PORT=$((30000 + SLURM_JOB_ID % 2700))
    exec srun "${srun_options[@]}" --kill-on-bad-exit=0 bash -c "$on_node" health --output_dir "$1"
}

# Runs accelerate with train_dpo.py on every node. Preemption and a plain scancel send TERM to every process of the step,
# but not to this script: the shell of each node writes the stop file, and the processes ignore the signal, because the
# launcher would kill the ranks after 30 s.
launch() {
    # Single quotes: SLURM_NODEID differs on each node. Expanded here, every node would act as the first.
    # shellcheck disable=SC2016
    local on_node='run=$1
        shift
        trap "" TERM
        source scripts/common.sh && use_environment
        export PET_SIGNALS_TO_HANDLE=SIGINT PET_SHUTDOWN_TIMEOUT=5 # torchrun: ranks ignore its TERM too, so kill soon
        python -m sfm_dpo.cluster.launch "$run" --machine_rank "$SLURM_NODEID" "$@" &
        trap "signalled=1; touch \"\$run/STOP\"" TERM
        signalled=1
        while [[ -n $signalled ]]; do # a signal ends the wait as well
            signalled=
            code=0
            wait $! || code=$?
        done
        exit "$code"'
    local run=$1
    shift
    # --wait=0: rank 0 may push to the Hub long after the other nodes have ended; --kill-on-bad-exit handles crashes.
    exec srun "${srun_options[@]}" --wait=0 --kill-on-bad-exit=1 bash -c "$on_node" node "$run" \
        --config_file "$config_file" --num_machines "$SLURM_JOB_NUM_NODES" \
        --num_processes "$((SLURM_JOB_NUM_NODES * per_node))" --main_process_ip "$host" --main_process_port "$port" \
        train_dpo.py "$@"
}
