#!/usr/bin/env bash
# Weak and strong scaling: an array job for each number of nodes, a task of it for each point.
#   NODES="1 2 4" SCHEMES="1f1b chimera" scripts/slurm/scaling.sh [--dry-run] [KEY=VALUE ...]
# Called again it submits what is neither done nor queued: failed points go on from their checkpoints, new ones are added.
# A point is a line of $STUDY/NODES-nodes/points; log, checkpoints, output and exit code are in a folder by its number.
set -euo pipefail

STUDY=${STUDY:-runs/scaling}
CONFIG=${CONFIG:-gpt2-small}
SCALING=${SCALING:-weak strong}
NODES=${NODES:-1 2 4 8}
SCHEMES=${SCHEMES:-1f1b chimera chimera_zb}
DEPTHS=${DEPTHS:-4 8}
MICRO_BATCHES=${MICRO_BATCHES:-4 8}         # of a pipeline group
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-8}     # weak: samples; the mini-batch grows with the replicas
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-512}     # strong: samples; micro-batches shrink
STEPS=${STEPS:-30}
TIME=${TIME:-0:30:00}                       # limit of a point
CONCURRENT=${CONCURRENT:-}                  # points of an array at a time; empty: as many as fit

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export CHIMERA_ENV=${CHIMERA_ENV:-$here/env.sh}
# shellcheck source=scripts/slurm/env.sh
source "$CHIMERA_ENV"

dry_run=''
if [ "${1:-}" = --dry-run ]; then
    dry_run=yes
    shift
fi

# The keys of all points that are asked for, a line each.
points() {
    local scaling size scheme depth micro_batches
    for scaling in $SCALING; do
        case $scaling in
            weak) size=micro_batch_size=$MICRO_BATCH_SIZE ;;
            strong) size=mini_batch_size=$MINI_BATCH_SIZE ;;
            *) echo "SCALING is weak, strong or both, not $scaling" >&2 && return 2 ;;
        esac
        for scheme in $SCHEMES; do
            for depth in $DEPTHS; do
                for micro_batches in $MICRO_BATCHES; do
                    echo "scheme=$scheme depth=$depth micro_batches=$micro_batches $size steps=$STEPS" "$@"
                done
            done
        done
    done
}

# The numbers of those points of a folder that wait or run.
queued_of() {
    [ -e "$1/jobs" ] || return 0
    squeue --me --noheader --array --format='%F %K' | awk 'FNR == NR { ours[$1]; next } $1 in ours { print $2 }' "$1/jobs" -
}

# Submit the points of one number of nodes.
submit() {
    local nodes=$1 folder=$STUDY/$1-nodes known=() asked=() reasons=() wanted=() before index point number queued array job
    shift
    mapfile -t asked < <(points "$@")
    mapfile -t reasons < <(printf '%s\n' "${asked[@]}" |
        chimera-mpi slurm "$CONFIG" --env "$CHIMERA_ENV" --nodes "$nodes" --ranks-per-node "$RANKS_PER_NODE" --time "$TIME" --check)
    [ ${#reasons[@]} -eq ${#asked[@]} ]
    [ ! -e "$folder/points" ] || mapfile -t known <"$folder/points"
    before=${#known[@]}
    local -A numbers=()
    for index in "${!known[@]}"; do
        numbers[${known[index]}]=$((index + 1))
    done
    queued=" $(queued_of "$folder" | tr '\n' ' ') "
    for index in "${!asked[@]}"; do
        point=${asked[index]} number=${numbers[${asked[index]}]:-}
        if [ -n "${reasons[index]}" ]; then
            echo "left out   on $nodes nodes: $point: ${reasons[index]}"
        elif [ -n "$number" ] && [ "$(cat "$folder/$number/status" 2>/dev/null)" = 0 ]; then
            echo "done       $folder/$number: $point"
        elif [ -n "$number" ] && [[ $queued == *" $number "* ]]; then
            echo "queued     $folder/$number: $point"
        else
            if [ -z "$number" ]; then
                known+=("$point")
                number=${#known[@]}
            fi
            wanted+=("$number")
            echo "to submit  $folder/$number: $point"
        fi
    done
    [ ${#wanted[@]} -gt 0 ] || return 0

    array=$(IFS=, && echo "${wanted[*]}")${CONCURRENT:+%$CONCURRENT}
    local command=(sbatch --parsable --array="$array" --nodes="$nodes" --ntasks-per-node="$RANKS_PER_NODE"
        --time="$TIME" --job-name="scaling-$nodes" --output="$folder/%a/output" "$here/train.sbatch")
    if [ "$GPUS_PER_NODE" -gt 0 ]; then
        command=("${command[@]:0:1}" --gpus-per-node="$GPUS_PER_NODE" "${command[@]:1}")
    fi
    if [ -n "$dry_run" ]; then
        echo "would run  RUN=$folder CONFIG=$CONFIG ${command[*]}"
        return
    fi
    for number in "${wanted[@]}"; do
        mkdir -p "$folder/$number"
        rm -f "$folder/$number/status"
    done
    if [ ${#known[@]} -gt "$before" ]; then
        printf '%s\n' "${known[@]}" >"$folder/points.new"
        mv "$folder/points.new" "$folder/points"
    fi
    job=$(RUN=$folder CONFIG=$CONFIG "${command[@]}")
    echo "${job%%;*}" >>"$folder/jobs"
    echo "submitted  job ${job%%;*}: ${#wanted[@]} points on $nodes nodes each"
}

if [ -z "$dry_run" ]; then
    mkdir -p "$STUDY"
    exec 9>"$STUDY/.lock"
    flock --nonblock 9 || { echo "another $0 is submitting $STUDY" >&2 && exit 1; }
fi
for nodes in $NODES; do
    submit "$nodes" "$@"
done
