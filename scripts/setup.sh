#!/usr/bin/env bash
# Makes .venv with everything in requirements.txt. Installs Debian's python3-venv where it is missing
# and we may; otherwise says what to do.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

fail() { echo "error: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no $python here: install Python 3.11 or newer, or run make PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old: install Python 3.11 or newer, or run make PYTHON=/path/to/python"

if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo"; else
        fail "Python's venv module is missing: run 'apt-get install python$version-venv' and try again"
    fi
    $sudo apt-get update -qq && $sudo apt-get install -y -qq "python$version-venv"
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "installing packages into .venv (a few minutes the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
touch .venv/ready
