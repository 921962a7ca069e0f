#!/usr/bin/env bash
# Creates .env and secrets/ with new passwords for compose.yaml. Existing files stay unchanged.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
[ -f secrets/mongo_keyfile ] || openssl rand -base64 756 > secrets/mongo_keyfile
[ -f secrets/mongo_password ] || openssl rand -hex 24 > secrets/mongo_password
if [ ! -f .env ]; then
  {
    echo "MONGO_PASSWORD=$(cat secrets/mongo_password)"
    for user in TRAINER SAMPLER SERVER; do
      echo "${user}_PASSWORD=$(openssl rand -hex 24)"
    done
    echo "MCP_SERVER_TOKEN=$(openssl rand -hex 32)"
    echo "AGENTRL_API_KEY=$(openssl rand -hex 32)"
    echo "AGENTRL_ADMIN_KEY=$(openssl rand -hex 32)"
  } > .env
fi
