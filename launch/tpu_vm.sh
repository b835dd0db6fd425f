#!/usr/bin/env bash
# Runs main.py on every host of a Cloud TPU slice, from a machine that has gcloud:
#
#   launch/tpu_vm.sh [--dry-run] NAME ZONE --config=configs/frozenlake_ppo.py:qwen2.5-0.5b \
#     --config.mesh.fsdp=16 --config.optimizer.micro_batch_size=16 --workdir=/mnt/shared/runs/slice
#
# It copies the last commit to all hosts, installs the requirements, and starts one process per host. The processes find
# each other (--coordinator=auto). The workdir must be on a disk that all hosts have mounted, such as Filestore.
# --dry-run prints the commands instead. PYTHON names the hosts' interpreter, 3.11 or newer (by default `python3`).
set -euo pipefail

dry_run=false
if [[ ${1-} == --dry-run ]]; then
  dry_run=true
  shift
fi
if [[ $# -lt 2 || $1 == -* || $2 == -* ]]; then
  echo "error: usage: launch/tpu_vm.sh [--dry-run] NAME ZONE [arguments of main.py]: NAME and ZONE of the slice are missing" >&2
  exit 2
fi
name=$1 zone=$2
shift 2

run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

on_all_hosts() { run gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
archive=$directory/ragen-jax.tar.gz
run git -C "$(dirname "$0")/.." archive --output="$archive" HEAD
run gcloud compute tpus tpu-vm scp "$archive" "$name:ragen-jax.tar.gz" --zone="$zone" --worker=all
on_all_hosts "mkdir -p ragen-jax && tar -xzf ragen-jax.tar.gz -C ragen-jax && cd ragen-jax && \
${PYTHON:-python3} -m venv .venv && .venv/bin/pip install --quiet -r requirements.txt 'jax[tpu]'"
# The quotes of the arguments must outlive the shell of the hosts.
on_all_hosts "cd ragen-jax && .venv/bin/python main.py --coordinator=auto$(printf ' %q' "$@")"
