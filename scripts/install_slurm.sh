#!/usr/bin/env bash
# Installs Debian's SLURM packages if they are missing and we have permission. If not, it prints the
# reason, and the SLURM test is skipped.
set -euo pipefail
PATH=$PATH:/usr/sbin

skip() { echo "SLURM is not available: $*; its test will be skipped"; exit 0; }

command -v slurmctld >/dev/null && command -v slurmd >/dev/null && exit 0
command -v apt-get >/dev/null || skip "it is not installed, and there is no apt-get to install it"
if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo"; else
    skip "installing it needs root: run 'apt-get install slurm-wlm munge'"
fi
echo "test-slurm: installing the Debian packages slurm-wlm and munge"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq || skip "apt-get update failed"
$sudo apt-get install -y -qq --no-install-recommends slurm-wlm munge || skip "apt-get failed"
