#!/usr/bin/env bash
# Install, check style, run the tests. `--full` adds the slow tests; every argument goes to pytest.
#
# megatron-core has needed Python 3.12 since 0.17. Where there is one beside an older default, the tests of the hooks run
# a second time, in .venv312 with that release, unless the arguments name the tests to run; with --full those of the
# trainer too, and the CUDA sources are compiled if torch there has CUDA and nvcc is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_312() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null
}

find_312() {
    local candidate
    for candidate in python3.12 "$(pyenv root 2>/dev/null)"/versions/3.12.*/bin/python; do
        if is_312 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

names_tests() {
    local argument
    for argument in "$@"; do
        [[ -e ${argument%%::*} ]] && return
    done
    return 1
}

bash scripts/install.sh
# Distributed tests run several processes on few cores; more threads in each would only fight.
export OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python -m pytest -q --durations=15 "$@"

newer=$(find_312)
if [[ -n $newer ]] && ! is_312 .venv/bin/python && ! names_tests "$@"; then
    PYTHON=$newer VENV=.venv312 bash scripts/install.sh
    again=(tests/hooks)
    [[ " $* " == *" --full "* ]] && again+=(tests/training tests/test_csrc.py)
    .venv312/bin/python -m pytest -q --durations=15 "${again[@]}" "$@"
fi
