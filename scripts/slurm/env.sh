# shellcheck shell=bash
# What belongs to a cluster and not to a job: the one file to edit. All jobs here source it, and those that
# `chimera-mpi slurm` writes. NAME=VALUE in the environment of sbatch overrules a setting.

# The modules of MPI and CUDA, and the virtual environment that chimera-mpi is installed in.
# module load mpich cuda
VENV=${VENV:-.venv}

# How srun starts MPI: pmi2 for MPICH, MVAPICH and Intel MPI, cray_shasta on Cray, pmix for Open MPI (srun --mpi=list).
MPI_TYPE=${MPI_TYPE:-pmi2}

# What a rank is bound to: cores, sockets, ldoms, none. Ranks that share a GPU's or a network card's socket are faster.
BINDING=${BINDING:-cores}

# The shape of a node, for scaling.sh and compare_schemes.sh.
export GPUS_PER_NODE=${GPUS_PER_NODE:-0}
export RANKS_PER_NODE=${RANKS_PER_NODE:-$((GPUS_PER_NODE > 0 ? GPUS_PER_NODE : 1))}

# From here on nothing is a site's.
if [ -e "$VENV/bin/activate" ]; then
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
fi

# The one launcher of a job, and the threads of each rank: by default the CPUs that it has of its node.
if [ -n "${SLURM_JOB_ID:-}" ]; then
    cpus_per_rank=$((SLURM_CPUS_ON_NODE / ${SLURM_NTASKS_PER_NODE:-1}))
    cpus_per_rank=$((cpus_per_rank > 0 ? cpus_per_rank : 1))
    export OMP_NUM_THREADS=${THREADS:-$cpus_per_rank}
    # shellcheck disable=SC2034  # the jobs use it
    launcher=(srun --mpi="$MPI_TYPE" --kill-on-bad-exit=1 --cpus-per-task="$cpus_per_rank" --cpu-bind="verbose,$BINDING")
fi
