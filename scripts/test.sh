#!/usr/bin/env bash
# Install, check style, run the tests. `--full` adds the slow tests; every argument goes to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh
# Distributed tests run several processes on few cores; more threads in each would only fight.
export OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python -m pytest -q --durations=15 "$@"
