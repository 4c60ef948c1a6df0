#!/usr/bin/env bash
# Creates .venv with everything in requirements.txt and, if available, EnvPool for Procgen.
# Installs missing Debian packages (python3-venv, libqt5gui5) if we have permission.
# A .venv that this script did not create, or a link to one elsewhere, is used but never changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

fail() { echo "error: $*" >&2; exit 1; }

made=.venv/made_by_setup  # older environments have only .venv/ready
if [ -L .venv ] || { [ -e .venv ] && [ ! -e "$made" ] && [ ! -e .venv/ready ]; }; then
    echo "setup: .venv was not made by this script, so nothing is installed into it; packages may differ from requirements.txt"
    .venv/bin/python -c 'import hydra, pytest, torch' ||
        fail ".venv lacks packages: install requirements.txt into it yourself, or move .venv away and run make again"
    exit 0
fi

command -v "$python" >/dev/null || fail "$python not found: install Python 3.11 or newer, or run make PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: install Python 3.11 or newer, or run make PYTHON=/path/to/python"

may_install() { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
debian() {  # installs a Debian package, as root or through sudo
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo"
    $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends "$1" >/dev/null
}

if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "setup: Python's venv module is missing; installing the Debian package python$version-venv"
    may_install || fail "Python's venv module is missing: run 'apt-get install python$version-venv' and try again"
    debian "python$version-venv"
fi

echo "setup: installing requirements.txt (PyTorch and others), this package (editable) and"
echo "setup: requirements-procgen.txt into $PWD/.venv: 7 GB, about 3 minutes on a fast connection."
echo "setup: nothing outside .venv changes, except pip's cache"
began=$SECONDS
[ -x .venv/bin/python ] || "$python" -m venv .venv
touch "$made"
echo "setup: 1 of 3: requirements.txt"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
echo "setup: 2 of 3: this package"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .

# EnvPool depends on the assets of all its environments (230 MB), so we install only those that
# Procgen needs. Its wheel for Python 3.11 uses the system's Qt.
echo "setup: 3 of 3: requirements-procgen.txt"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-procgen.txt
if ! .venv/bin/python -c 'from ed.envs.procgen import load_envpool; load_envpool()' 2>/dev/null; then
    if may_install && command -v apt-get >/dev/null; then
        echo "setup: EnvPool needs Qt; installing the Debian package libqt5gui5"
        debian libqt5gui5 || true
    else
        echo "note: EnvPool does not load, so the Procgen tests will be skipped; to fix this, run 'apt-get install libqt5gui5'"
    fi
fi
touch .venv/ready
echo "setup: done in $((SECONDS - began)) s"
