#!/usr/bin/env bash
# Install the package with its test tools into .venv at the root of the checkout. Users, CI and the docker images run
# this same script. A second run is quick: it does nothing until pyproject.toml, the interpreter or TORCH changes.
#
#   PYTHON   interpreter that makes the environment (default: python3); 3.10 to 3.13
#   TORCH    requirement for torch (default: torch==2.13.0; its CPU build where the package index has one)
#   VENV     folder of the environment (default: .venv)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}
venv=${VENV:-.venv}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

holds() { # FILE TEXT: whether the file is there and says exactly this
    [[ -f $1 && $(<"$1") == "$2" ]]
}

command -v "$python" >/dev/null ||
    fail "no interpreter '$python'; install Python 3.10 to 3.13, or set PYTHON=/path/to/python3"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
    fail "'$python' does not start; set PYTHON to another interpreter"
case $version in
    3.10 | 3.11 | 3.12 | 3.13) ;;
    *) fail "'$python' is Python $version, but 3.10 to 3.13 is needed; set PYTHON=/path/to/python3.12, say" ;;
esac

# An environment works for one interpreter and in one place; what is in it follows from the project's files.
environment="$("$python" -VV) at $PWD"
content="$torch $(cat pyproject.toml setup.py | cksum)"
if holds "$venv"/environment "$environment" && holds "$venv"/content "$content"; then
    exit 0
fi

echo "install.sh: installing into $venv with Python $version"
rm -f "$venv"/content
if ! holds "$venv"/environment "$environment"; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' has no venv module; on Debian and Ubuntu: apt-get install python$version-venv"
    "$python" -m venv --clear "$venv" || fail "could not make $venv; the lines above say why"
    echo "$environment" >"$venv"/environment
fi
"$venv"/bin/python -m pip install --quiet "$torch" ||
    fail "could not install '$torch'; set TORCH to a release that your package index has"
"$venv"/bin/python -m pip install --quiet --editable '.[megatron,netbed,test]' "$torch" ||
    fail "could not install megatron-compress; pip says why above"
echo "$content" >"$venv"/content
echo "install.sh: done; activate it with: source $venv/bin/activate"
