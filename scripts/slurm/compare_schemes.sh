#!/usr/bin/env bash
# All schemes at one shape, one after the other: those that cannot do it are named and left out.
#   NODES=8 MICRO_BATCHES=16 scripts/slurm/compare_schemes.sh [--dry-run] [KEY=VALUE ...]
# Otherwise as scaling.sh, whose settings it takes.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export CHIMERA_ENV=${CHIMERA_ENV:-$here/env.sh}
# shellcheck source=scripts/slurm/env.sh
source "$CHIMERA_ENV"

export STUDY=${STUDY:-runs/schemes}
export SCALING=weak
export NODES=${NODES:-4}
export DEPTHS=${DEPTHS:-$((NODES * RANKS_PER_NODE))}
export MICRO_BATCHES=${MICRO_BATCHES:-$DEPTHS}
export SCHEMES=${SCHEMES:-$(python -c 'from chimera_mpi.schedule import SCHEMES; print(*SCHEMES)')}
export CONCURRENT=${CONCURRENT:-1}
exec "$here/scaling.sh" "$@"
