#!/usr/bin/env bash
# Scores a checkpoint on the held-out questions and ends.
#   ./eval_example.sh RUN_NAME [--flag value ...]
# Takes the newest checkpoint of output/RUN_NAME, or --model_name_or_path DIRECTORY.
set -euo pipefail
if [ $# -lt 1 ] || [[ "$1" == -* ]]; then
  echo "usage: $0 RUN_NAME [--flag value ...]" >&2
  exit 2
fi
run_name=$1
shift
cd "$(dirname "$0")"
scripts/setup

exec .venv/bin/agentrl eval --run_name "$run_name" --config assets/demo/grpo.yaml "$@"
