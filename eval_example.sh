#!/usr/bin/env bash
# Scores a checkpoint on the held-out questions and ends.
#   ./eval_example.sh RUN_NAME [--flag value ...]
# Takes the newest checkpoint of output/RUN_NAME; without further flags, a run of the demo.
# For a run of your own, name your questions and tools again:
#   ./eval_example.sh RUN_NAME --eval_file held_out.jsonl --mcp_manager_url http://127.0.0.1:8000/mcp
set -euo pipefail
if [ $# -lt 1 ] || [[ "$1" == -* ]]; then
  echo "usage: $0 RUN_NAME [--flag value ...]" >&2
  exit 2
fi
run_name=$1
shift
cd "$(dirname "$0")"
scripts/setup

exec .venv/bin/agentrl eval --run_name "$run_name" "$@"
