#!/usr/bin/env bash
# Runs main.py in N processes on the CPU of this machine, as on a cluster of N machines:
#
#   launch/local.sh 2 --config=configs/frozenlake_ppo.py --workdir=runs/two
#
# This is for trials: one process drives all accelerators of a machine, so on one machine a single process is enough.
# If a process fails, the script stops the others and exits with the same status. On Ctrl-C, or SIGTERM to the script, all
# processes finish the iteration and save a checkpoint. PYTHON names the interpreter.
set -euo pipefail

if ! [[ ${1-} =~ ^[1-9][0-9]*$ ]]; then
  echo "error: usage: launch/local.sh N [arguments of main.py]: N must be a number of processes, and is ${1:-missing}" >&2
  exit 2
fi
processes=$1
shift
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
main=$(dirname "$0")/../main.py

port=$("${PYTHON:-python}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
pids=()
for ((i = 0; i < processes; i++)); do
  "${PYTHON:-python}" "$main" --coordinator="127.0.0.1:$port" --num_processes="$processes" --process_id="$i" "$@" &
  pids+=($!)
done
stop() { kill "$1" "${pids[@]}" 2>/dev/null || true; }
trap 'stop -KILL' EXIT
trap 'stop -TERM; wait; exit 130' INT
trap 'stop -TERM; wait; exit 143' TERM
for _ in "${pids[@]}"; do
  status=0
  wait -n || status=$?
  if ((status == 130 || status == 143)); then
    wait # all stop together, with a checkpoint
    exit "$status"
  elif ((status)); then
    sleep 1 # the others may report the failure too
    exit "$status"
  fi
done
trap - EXIT
