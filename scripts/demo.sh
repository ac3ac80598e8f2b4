#!/usr/bin/env bash
# From nothing to a trained model: prepare a corpus, train gpt-tiny with Chimera on 4 ranks, draw a step.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
cd "$root"

data=data/corpus.h5
log=runs/demo-$(date +%Y%m%d-%H%M%S).h5
mkdir -p runs

[ -e "$data" ] || chimera-mpi data prepare -o "$data"
mpi_run 4 chimera-mpi train gpt-tiny scheme=chimera depth=4 steps="${STEPS:-60}" data="$data" log="$log"
chimera-mpi report "$log" --svg "${log%.h5}.svg"
echo "the drawn step is ${log%.h5}.svg"
