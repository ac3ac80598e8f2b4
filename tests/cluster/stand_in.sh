#!/bin/bash
# In the place of `chimera-mpi`: train, calibrate and plan write down that they were called; the rest is as ever.
# calibrate and plan make the file that they are to make. train does what ACT says:
#   ACT="exit CODE"; or ACT=wait: until it is asked to stop, then leaves with 75, and at the second start is done.
# A run that has FAIL among its keys fails.
case $1 in
    train) ;;
    calibrate | plan)
        echo "rank $SLURM_PROCID: $*" >>"$1.calls"
        while [ "$1" != -o ]; do shift; done
        echo "# made" >"$2"
        exit
        ;;
    *) exec "${PYTHON:?}" -m chimera_mpi "$@" ;;
esac
for word; do
    case $word in log=*) run=$(dirname "${word#log=}") ;; esac
done
echo "start ${SLURM_RESTART_COUNT:-0} rank $SLURM_PROCID threads $OMP_NUM_THREADS: $*" >>"$run/starts"

# Wait until all ranks are here and deaf to the TERM by which the first that fails ends the others.
meet() {
    trap '' TERM
    touch "$run/here-$SLURM_PROCID"
    for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
        until [ -e "$run/here-$rank" ]; do sleep 0.05; done
    done
}

if [ -n "$FAIL" ] && [[ "$*" == *"$FAIL"* ]]; then
    meet
    exit 1
fi
case $ACT in
    exit*)
        meet
        $ACT
        ;;
    wait)
        [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
        trap 'sleep "0.$SLURM_PROCID"; exit 75' USR1 TERM
        echo $$ >"$run/up-$SLURM_PROCID.new"
        mv "$run/up-$SLURM_PROCID.new" "$run/up-$SLURM_PROCID"
        for _ in {1..600}; do
            sleep 0.1  # a longer one would outlive a kill, and its step with it
        done
        exit 1
        ;;
esac
exit 0
