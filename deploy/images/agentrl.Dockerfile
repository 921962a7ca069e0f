# One image for samplers, trainer, supervisors and the tool environment. From the repository's root:
#   docker build -f deploy/images/agentrl.Dockerfile -t agentrl --build-arg EXTRAS=engine,train .
# EXTRAS names a file of scripts/locked, or stays empty for samplers and environments, which need no
# torch. VERSION sets the output of `agentrl --version`, because the build context lacks the repository's
# tags. PYTHON_IMAGE may include a digest: python:3.11-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG VERSION=""
ENV SETUPTOOLS_SCM_PRETEND_VERSION_FOR_AGENTRL_MONGO=$VERSION \
    PIP_NO_CACHE_DIR=1 \
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
ARG EXTRAS=""
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/agentrl
COPY scripts/locked scripts/locked
COPY --from=build /build/dist dist
RUN python -m pip install --require-hashes --requirement "scripts/locked/${EXTRAS:-base}.txt" \
    && python -m pip install --no-index --no-deps dist/*.whl \
    && useradd --create-home --uid 10001 agentrl \
    # A new volume at one of these paths inherits its owner.
    && install -d -o agentrl -g agentrl output logs

USER 10001
ENTRYPOINT ["agentrl"]
CMD ["--help"]
