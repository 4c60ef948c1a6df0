#!/usr/bin/env bash
# Installs Debian's chromium and chromium-driver, for the browser test of the report page.
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo"; else
    echo "error: chromium not found: run 'apt-get install chromium chromium-driver' and try again" >&2
    exit 1
fi
echo "test-browser: installing the Debian packages chromium and chromium-driver (300 MB)"
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends chromium chromium-driver
