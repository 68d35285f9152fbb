# shellcheck shell=bash
# Functions that the batch scripts share; they source this file in a Slurm job and call `run_dpo RECIPE ARGUMENTS...`.
#
# Variables, from the environment of sbatch:
#   LAUNCH         zero2 (default: accelerate_config.yaml) or a name in configs/accelerate, for instance cpu
#   NUM_GPUS       processes per node; default: the GPUs that Slurm gave the job
#   NUM_PROCESSES  processes per node if LAUNCH starts with cpu; default 2
#   VENV           virtual environment; default: .venv here, otherwise the one active when sbatch was called
#   MAX_REQUEUES   how often a run that stopped on request is requeued; default 20
#   SKIP_HEALTHCHECK   1: train without first checking GPUs, disks and network
# Secrets and HF_HOME belong in .env, which train_dpo.py reads itself; nothing here prints or sources it.

set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

run_dpo() {
    [[ -n ${SLURM_JOB_ID:-} ]] || fail "no Slurm job: run 'sbatch scripts/...', or without Slurm 'accelerate launch'"
    trap 'fail "asked to stop before training began: --time must exceed the grace period in --signal=B:USR1@SECONDS"' USR1
    # A task's SLURM_JOB_ID may be the array's id, by which Slurm would requeue all tasks
    job_id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
    job_id=${job_id:-$SLURM_JOB_ID}
    export SLURM_JOB_START_TIME=${SLURM_JOB_START_TIME:-$(date +%s)} # Slurm sets it since 23.02; dates the STOP file
    cd "$SLURM_SUBMIT_DIR"
    use_environment
    choose_launch
    first_host
    if [[ ${2:-} == --members ]]; then # from scripts/sweep.py: a line of arguments for each task of the array
        [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || fail "--members $3: no array; submit it with: python scripts/sweep.py"
        local member
        mapfile -d '' -t member < <(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$3" | xargs printf '%s\0')
        set -- "${member[@]}" "${@:4}"
    fi
    set -- --config "$@" # the recipe; train_dpo.py uses the last --config, so the user's wins

    # One process reads the configuration before any node starts, so a mistake costs one line and a few seconds.
    local world=$((SLURM_JOB_NUM_NODES * per_node))
    local facts
    facts=$(python scripts/check_config.py "$config_file" "$world" "$@") || exit
    output_dir=${facts##*$'\n'} # libraries may also print
    [[ -n $output_dir ]] || exit 0    # already done; check_config.py said so
    status=$output_dir/status.json
    status_before=$(cat "$status" 2>/dev/null) || true

    say "job $SLURM_JOB_ID (restart ${SLURM_RESTART_COUNT:-0}) on $SLURM_JOB_NODELIST, rendezvous $host:$port"
    say "$SLURM_JOB_NUM_NODES node(s) x $per_node process(es), $config_file, environment $(command -v python)"
    say "train_dpo.py $(printf '%q ' "$@" | sed -E 's/(token[= ])[^ ]+/\1***/g')-> $output_dir"
    check_health
    launch "$@"
    finish
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
        export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= # even if the node has GPUs
    else
        per_node=${NUM_GPUS:-${SLURM_GPUS_ON_NODE:-}}
    fi
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
    srun_options=(--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
    # Since 22.05 srun no longer takes this one from the job.
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || srun_options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    ((SLURM_JOB_NUM_NODES == 1)) || srun_options+=(--label)
}

# Checks each node's GPUs, folders and connections in a few minutes at most; ends the job with code 69 if one fails.
check_health() {
    if [[ ${SKIP_HEALTHCHECK:-} == 1 ]]; then
        say "node check skipped"
        return
    fi
    export LOCAL_WORLD_SIZE=$per_node WORLD_SIZE=$((SLURM_JOB_NUM_NODES * per_node))
    # Not under torchrun, which makes 1 of every exit code and prints a traceback.
    # shellcheck disable=SC2016
    local on_node='source scripts/common.sh && use_environment
        [[ ${DS_ACCELERATOR:-} != cpu ]] || export CUDA_VISIBLE_DEVICES=
        for ((i = 0; i < LOCAL_WORLD_SIZE; i++)); do
            RANK=$((SLURM_NODEID * LOCAL_WORLD_SIZE + i)) LOCAL_RANK=$i timeout 600 python -m sfm_dpo.health.node_check "$@" &
        done
        code=0
        for pid in $(jobs -p); do wait "$pid" || code=$?; done
        exit "$code"'
    local code=0 # of the worst node
    MASTER_ADDR=$host MASTER_PORT=$((30000 + SLURM_JOB_ID % 2700)) \
        srun "${srun_options[@]}" --kill-on-bad-exit=0 bash -c "$on_node" health --output_dir "$output_dir" || code=$?
    unset LOCAL_WORLD_SIZE WORLD_SIZE
    if ((code != 0)); then
        say "ended: node check failed (code $code), exit code 69; nothing was trained"
        exit 69
    fi
}

# Runs accelerate on every node and sets launcher_code. srun stays in the background so that bash can act on signals.
# Preemption and a plain scancel send TERM to every process of the step, but not to this script: the shell of each node
# writes the stop file, and the processes ignore the signal, because the launcher would kill the ranks after 30 s.
launch() {
    # Single quotes: SLURM_NODEID differs on each node. Expanded here, every node would act as the first.
    # srun sets CUDA_VISIBLE_DEVICES anew.
    # shellcheck disable=SC2016
    local on_node='run=$1
        shift
        trap "" TERM
        source scripts/common.sh && use_environment
        [[ ${DS_ACCELERATOR:-} != cpu ]] || export CUDA_VISIBLE_DEVICES=
        export PET_SIGNALS_TO_HANDLE=SIGINT PET_SHUTDOWN_TIMEOUT=5 # torchrun: ranks ignore its TERM too, so kill soon
        python -m sfm_dpo.run.launch "$run" --machine_rank "$SLURM_NODEID" "$@" &
        trap "signalled=1; touch \"\$run/STOP\"" TERM
        signalled=1
        while [[ -n $signalled ]]; do # a signal ends the wait as well
            signalled=
            code=0
            wait $! || code=$?
        done
        exit "$code"'

    local signalled=1
    trap 'signalled=1; say "asked to stop: $output_dir/STOP"; mkdir -p "$output_dir"; touch "$output_dir/STOP"' USR1 TERM
    # --wait=0: rank 0 may push to the Hub long after the other nodes have ended; --kill-on-bad-exit handles crashes.
    srun "${srun_options[@]}" --wait=0 --kill-on-bad-exit=1 bash -c "$on_node" node "$output_dir" \
        --config_file "$config_file" --num_machines "$SLURM_JOB_NUM_NODES" \
        --num_processes "$((SLURM_JOB_NUM_NODES * per_node))" --main_process_ip "$host" --main_process_port "$port" \
        train_dpo.py "$@" &
    while [[ -n $signalled ]]; do # a signal ends the wait as well
        signalled=
        launcher_code=0
        wait $! || launcher_code=$?
    done
    trap '' USR1 TERM # too late to stop
}

# Ends the job with the run's own exit code: the launcher returns 0 for a stop on request.
finish() {
    local code=$launcher_code state=unknown step='' message='' fields=()
    if [[ -f $status && $(cat "$status") != "$status_before" ]] && grep -q "\"job\": \"$SLURM_JOB_ID\"" "$status"; then
        # Progress is a later step than this start began with (the previous start may have been killed after that step),
        # or more shards of the reference cache than when the previous start stopped.
        mapfile -t fields < <(python -c '
import json, sys
run, before = json.load(open(sys.argv[1])), json.loads(sys.argv[2] or "{}")
try:
    environment = json.load(open(sys.argv[3]))
except (OSError, ValueError):
    environment = {}
began = environment["starts"][-1]["step"] if environment.get("starts") else before.get("step")
done, had = [run["step"] or 0, run.get("shards") or 0], [began or 0, before.get("shards") or 0]
hangs = sum(hang["job"] == run["job"] for hang in environment.get("hangs", []))
print(run["state"], run["exit_code"], run["step"], " ".join(run["message"].split()), done > had, sep="\n")
print(hangs, (run["checkpoint"] or "").rpartition("/")[2], run.get("host") or "", sep="\n")
' "$status" "$status_before" "$output_dir/environment.json")
        state=${fields[0]} step=${fields[2]#None} message=${fields[3]}
        if [[ $state == running ]]; then # killed before it could record how it ended
            state=died message="the processes were killed or crashed (launcher's exit code $launcher_code)"
            ((code != 0)) || code=1
        else
            code=${fields[1]}
        fi
    fi
    [[ $state != stopped ]] || ((code != 75)) || requeue "${fields[4]}" # 0: only the preflight was requested; 130: interrupted
    [[ $state != hung ]] || requeue_hung "${fields[@]:5}"
    say "ended: state $state, exit code $code, ${step:+step $step, }$output_dir${message:+: $message}"
    exit "$code"
}

requeue() {
    local restarts=${SLURM_RESTART_COUNT:-0} limit=${MAX_REQUEUES:-20} job_state
    job_state=$(scontrol --oneliner show job "$job_id" | sed -n 's/.* JobState=\([^ ]*\).*/\1/p')
    if [[ $job_state != RUNNING ]]; then # a cancelled job is COMPLETING, and requeue would restart it
        say "$state, not requeued: Slurm is ending the job ($job_state), as after scancel; resubmit to resume"
    elif ((restarts >= limit)); then
        say "$state, not requeued: restarted $restarts times, MAX_REQUEUES=$limit; resubmit to resume"
    elif ((restarts > 0)) && [[ $1 != True ]]; then
        say "$state, not requeued: this restart finished no step and no shard; resubmit with a longer --time"
    elif scontrol requeue "$job_id"; then
        say "$state and requeued (restart $((restarts + 1)) of at most $limit)"
    else
        say "$state, and Slurm refused to requeue; resubmit to resume"
    fi
}

# A node often causes a hang. The job is requeued at most twice, if there is a checkpoint; and without the node of the
# rank that was stuck, if that is known and the partition has enough other nodes.
requeue_hung() {
    local hangs=$1 checkpoint=$2 node=$3 excluded others
    if [[ -z $checkpoint ]]; then
        say "hung before the first checkpoint; not requeued. Resubmit to start again"
        return
    elif ((hangs > 2)); then
        say "hung $hangs times in this job; not requeued. Resubmit to resume from $checkpoint"
        return
    fi
    requeue True
    excluded=$(scontrol --oneliner show job "$job_id" | sed -n 's/.* ExcNodeList=\([^( ]*\).*/\1/p')
    others=$(sinfo --noheader --partition="$SLURM_JOB_PARTITION" --Node --format=%N | sort -u |
        grep -vxFf <(scontrol show hostnames "${excluded:+$excluded,}$node")) || true
    if [[ -n $node ]] && (($(wc -w <<<"$others") >= SLURM_JOB_NUM_NODES)); then
        scontrol update JobId="$job_id" ExcNodeList="${excluded:+$excluded,}$node" &&
            say "the job will avoid node $node; to allow it again: scontrol update JobId=$job_id ExcNodeList=$excluded"
    fi
}
