#!/usr/bin/env bash
# As grpo_example.sh, with the MINIRL loss: strict bounds, no length normalisation.
#   ./minirl_example.sh RUN_NAME [--flag value ...]
set -euo pipefail
if [ $# -lt 1 ] || [[ "$1" == -* ]]; then
  echo "usage: $0 RUN_NAME [--flag value ...]" >&2
  exit 2
fi
run_name=$1
shift
cd "$(dirname "$0")"
scripts/setup

exec .venv/bin/agentrl run --run_name "$run_name" --loss_calculator MINIRL \
  --strict_in_bound true --token_level_loss false --skip_length_normalization true "$@"
