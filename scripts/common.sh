# shellcheck shell=bash
# Sourced by the scripts beside it: a virtual environment with everything pinned, and a way to start MPI jobs.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${CHIMERA_VENV:-$root/.venv}

# The first Python that fits, or the one named by PYTHON.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python 3.10 to 3.13 among: ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; set PYTHON" >&2
    return 1
}

# Make or refresh the environment. MPI is the system's where there is one, else the mpich wheel.
# A stamp of what was asked for makes a second call quick.
set_up() {
    local python extras=test wanted
    case $(command -v mpiexec) in '' | "$venv"/*) extras=test,mpich ;; esac
    wanted="$extras $(cat "$root/setup.cfg" "$root/constraints.txt" | cksum)"
    if [ "$(cat "$venv/.set-up" 2>/dev/null)" != "$wanted" ]; then
        python=$(find_python) || return 1
        echo "setting up $venv with $("$python" --version)"
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" --editable "${root}[$extras]"
        echo "$wanted" >"$venv/.set-up"
    fi
    PATH=$venv/bin:$PATH
}

# mpi_run RANKS COMMAND...: also as root and with more ranks than cores, which Open MPI must be told.
mpi_run() {
    local ranks=$1 flags=()
    shift
    if mpiexec --version 2>&1 | grep -qE 'Open MPI|OpenRTE'; then
        flags=(--oversubscribe --bind-to none)
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    mpiexec "${flags[@]}" -n "$ranks" "$@"
}
