#!/usr/bin/env bash
# Set up what is missing and run the tests: scripts/test.sh [PYTEST ARGUMENTS]
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
cd "$root"
exec python -m pytest "$@"
