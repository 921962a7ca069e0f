# The tool environment with Node.js, which also runs npm servers (`npx`).
#   docker build -f deploy/images/environment.Dockerfile -t agentrl-environment .
# PYTHON_IMAGE and NODE_IMAGE may include digests: node:22-bookworm-slim@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG NODE_IMAGE=node:22-bookworm-slim
FROM ${NODE_IMAGE} AS node

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY scripts/locked/build.txt scripts/locked/
RUN python -m pip install --require-hashes --requirement scripts/locked/build.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY scripts/hatch_build.py scripts/
COPY assets assets
COPY examples examples
COPY src src
RUN python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

FROM ${PYTHON_IMAGE}
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

COPY --from=node /usr/local/bin/node /usr/local/bin/node
COPY --from=node /usr/local/lib/node_modules /usr/local/lib/node_modules
WORKDIR /opt/agentrl
COPY scripts/locked scripts/locked
COPY --from=build /build/dist dist
RUN ln -s ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm \
    && ln -s ../lib/node_modules/npm/bin/npx-cli.js /usr/local/bin/npx \
    && python -m pip install --require-hashes \
        --requirement scripts/locked/base.txt --requirement scripts/locked/uv.txt \
    && python -m pip install --no-index --no-deps dist/*.whl \
    && useradd --create-home --uid 10001 agentrl

USER 10001
EXPOSE 8000
# The container is the wall: most runtimes give it no namespaces.
ENTRYPOINT ["agentrl", "env", "up", "--host", "0.0.0.0", "--port", "8000", "--allow_unconfined_tools"]
CMD ["--mcp_servers", "/etc/agentrl/servers.json"]
