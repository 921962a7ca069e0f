#!/usr/bin/env bash
# Trains an agent with tools by GRPO and shows its progress.
#   ./grpo_example.sh RUN_NAME [--flag value ...]
# Without further flags: a tiny model on the shop questions, on any machine with Python 3.11+.
# With flags, the same command trains other models, for example on GPUs:
#   ./grpo_example.sh RUN_NAME --model_name_or_path Qwen/Qwen3-4B --inference_backend sglang \
#     --train_file my.jsonl --mcp_manager_url http://127.0.0.1:8000/mcp --learning_rate 2e-6
# A trainer on several machines is started by torchrun: see docs/deploy.md.
set -euo pipefail
if [ $# -lt 1 ] || [[ "$1" == -* ]]; then
  echo "usage: $0 RUN_NAME [--flag value ...]" >&2
  exit 2
fi
run_name=$1
shift
cd "$(dirname "$0")"
scripts/setup

exec .venv/bin/agentrl run --run_name "$run_name" "$@"
