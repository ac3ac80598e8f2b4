#!/usr/bin/env bash
# Set up what is missing and run the tests: scripts/test.sh [PYTEST ARGUMENTS]
# Without arguments all of them: first those in an MPI job, whose ranks fill the cores, then two files at a time.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
cd "$root"
unset PYTHONDONTWRITEBYTECODE # some hundred processes would each compile the sources anew
[ $# -eq 0 ] || exec python -m pytest "$@"
status=0
python -m pytest -m mpi || status=$?
python -m pytest -m "not mpi" -n 2 --dist loadfile --durations=25 || status=$?
exit "$status"
