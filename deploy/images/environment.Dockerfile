# The tools' environment with Node.js, so that servers of npm (`npx`) can be children, too.
#   docker build -f deploy/images/environment.Dockerfile -t agentrl-environment .
FROM node:22-bookworm-slim AS node

FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

COPY --from=node /usr/local/bin/node /usr/local/bin/node
COPY --from=node /usr/local/lib/node_modules /usr/local/lib/node_modules
WORKDIR /opt/agentrl
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY scripts/constraints.txt scripts/hatch_build.py scripts/
COPY assets assets
COPY examples examples
COPY src src
RUN ln -s ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm \
    && ln -s ../lib/node_modules/npm/bin/npx-cli.js /usr/local/bin/npx \
    && python -m pip install --constraint scripts/constraints.txt . uv==0.9.13 \
    && useradd --create-home --uid 10001 agentrl

USER 10001
EXPOSE 8000
ENTRYPOINT ["agentrl", "env", "up", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--mcp_servers", "/etc/agentrl/servers.json"]
