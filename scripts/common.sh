# shellcheck shell=bash
# What the batch scripts share; they source it inside a Slurm job and call `run_dpo RECIPE ARGUMENTS...`.
#
# Variables, from the environment of sbatch:
#   LAUNCH         zero2 (default: accelerate_config.yaml) or a name in configs/accelerate, for instance cpu
#   NUM_GPUS       processes per node; default: the GPUs that Slurm gave the job
#   NUM_PROCESSES  processes per node where LAUNCH starts with cpu; default 2
#   VENV           virtual environment; default: .venv here, otherwise what was active when sbatch was typed
#   MAX_REQUEUES   how often a run that stopped on request goes back into the queue; default 20
# Secrets and HF_HOME belong in .env, which train_dpo.py reads by itself: nothing here prints or sources it.

set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

run_dpo() {
    [[ -n ${SLURM_JOB_ID:-} ]] || fail "no Slurm job: run 'sbatch scripts/...', or without Slurm 'accelerate launch'"
    trap 'fail "asked to stop before training began: --time must exceed the lead of --signal=B:USR1@600"' USR1
    cd "$SLURM_SUBMIT_DIR"
    use_environment
    choose_launch
    first_host
    set -- --config "$@" # the recipe; train_dpo.py takes the last --config, so the user's wins

    # One process reads the configuration before any node starts: a mistake is one line, and costs seconds.
    local world=$((SLURM_JOB_NUM_NODES * per_node))
    output_dir=$(python scripts/check_config.py "$config_file" "$world" "$@") || exit
    output_dir=${output_dir##*$'\n'} # libraries may print, too
    [[ -n $output_dir ]] || exit 0    # already done; check_config.py said so
    status=$output_dir/status.json
    status_before=$(cat "$status" 2>/dev/null) || true

    say "job $SLURM_JOB_ID (restart ${SLURM_RESTART_COUNT:-0}) on $SLURM_JOB_NODELIST, rendezvous $host:$port"
    say "$SLURM_JOB_NUM_NODES node(s) x $per_node process(es), $config_file, environment $(command -v python)"
    say "train_dpo.py $(printf '%q ' "$@" | sed -E 's/(token[= ])[^ ]+/\1***/g')-> $output_dir"
    launch "$@"
    finish
}

say() { echo "[${SLURM_JOB_NAME:-dpo} $(date '+%F %T')] $*"; }

use_environment() {
    local venv=${VENV:-.venv}
    if [[ -x $venv/bin/accelerate ]]; then
        venv=$(cd "$venv" && pwd)
        export PATH="$venv/bin:$PATH" VIRTUAL_ENV="$venv"
    elif [[ -n ${VENV:-} ]]; then
        fail "VENV=$VENV: no accelerate in its bin folder; create it with: make setup VENV=$VENV"
    elif ! command -v accelerate >/dev/null; then
        fail "no Python environment: run 'make setup' here, or set VENV to the one to use"
    fi
    export PYTHONUNBUFFERED=1
}

# Sets config_file and per_node (processes on each node).
choose_launch() {
    local name=${LAUNCH:-zero2}
    config_file=configs/accelerate/$name.yaml
    [[ $name != zero2 ]] || config_file=accelerate_config.yaml
    if [[ ! -f $config_file ]]; then
        local known
        known=$(cd configs/accelerate && printf '%s ' *.yaml)
        fail "LAUNCH=$name: no $config_file; choose one of: zero2 ${known//.yaml/}"
    fi
    if [[ $name == cpu* ]]; then
        per_node=${NUM_PROCESSES:-2}
        export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= # also where the node has GPUs
    else
        per_node=${NUM_GPUS:-${SLURM_GPUS_ON_NODE:-}}
    fi
    [[ $per_node =~ ^[1-9][0-9]*$ ]] ||
        fail "processes per node is '$per_node': submit with --gpus-per-node=4, or set NUM_GPUS, or LAUNCH=cpu"
    local threads=$((${SLURM_CPUS_PER_TASK:-1} / per_node))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# Sets host and port of the rendezvous. Every node must meet at the same place: there is no fallback to localhost, with
# which each node would train alone. The address is the one under which Slurm itself reaches the node.
first_host() {
    local name
    name=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    host=$(scontrol --oneliner show node "$name" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    [[ -n $host ]] || fail "scontrol gives no address for node '$name', the first of $SLURM_JOB_NODELIST"
    port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on a node do not meet; below the ephemeral range
}

# Runs accelerate on every node and sets launcher_code. srun stays in the background so that bash can act on signals.
launch() {
    # Single quotes: SLURM_NODEID is each node's own. Expanded here, every node would call itself the first.
    # srun sets CUDA_VISIBLE_DEVICES anew.
    # shellcheck disable=SC2016
    local on_node='[[ ${DS_ACCELERATOR:-} != cpu ]] || export CUDA_VISIBLE_DEVICES=
        exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"'
    local options=(--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --wait=60 --kill-on-bad-exit=1)
    # Since 22.05 srun no longer takes this one from the job.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    ((SLURM_JOB_NUM_NODES == 1)) || options+=(--label)

    local signalled=
    trap 'signalled=1; say "asked to stop: $output_dir/STOP"; mkdir -p "$output_dir"; touch "$output_dir/STOP"' USR1 TERM
    srun "${options[@]}" bash -c "$on_node" accelerate \
        --config_file "$config_file" --num_machines "$SLURM_JOB_NUM_NODES" \
        --num_processes "$((SLURM_JOB_NUM_NODES * per_node))" --main_process_ip "$host" --main_process_port "$port" \
        train_dpo.py "$@" &
    launcher_code=0
    wait $! || launcher_code=$?
    while [[ -n $signalled ]]; do # the signal, not the end of srun, ended the wait
        signalled=
        launcher_code=0
        wait $! || launcher_code=$?
    done
    trap '' USR1 TERM # too late to stop
}

# Ends the job with the run's own verdict. The launcher turns every failure into 1, and a stop on request into 0.
finish() {
    local code=$launcher_code state=unknown step='' message='' fields=()
    if [[ -f $status && $(cat "$status") != "$status_before" ]]; then
        mapfile -t fields < <(python -c '
import json, sys
run = json.load(open(sys.argv[1]))
print(run["state"], run["exit_code"], run["step"], " ".join(run["message"].split()), sep="\n")' "$status")
        state=${fields[0]} step=${fields[2]} message=${fields[3]}
        if [[ $state == running ]]; then # killed: nobody was left to write how it ended
            state=died message="the processes ended without a word (launcher's exit code $launcher_code)"
            ((code != 0)) || code=1
        else
            code=${fields[1]}
        fi
    fi
    [[ $state != stopped ]] || requeue
    say "ended: state $state, exit code $code, step ${step:-None}, $output_dir${message:+: $message}"
    exit "$code"
}

requeue() {
    local restarts=${SLURM_RESTART_COUNT:-0} limit=${MAX_REQUEUES:-20}
    if ((restarts >= limit)); then
        say "stopped, not requeued: restarted $restarts times, MAX_REQUEUES=$limit; submit again to go on"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "stopped and requeued (restart $((restarts + 1)) of at most $limit)"
    else
        say "stopped, and Slurm refused to requeue; submit again to go on"
    fi
}
