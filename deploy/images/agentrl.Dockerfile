# One image for samplers, trainer, supervisors and the tools' environment. From the repository's root:
#   docker build -f deploy/images/agentrl.Dockerfile -t agentrl --build-arg EXTRAS=engine,train .
# EXTRAS may be left empty for samplers and environments, which need no torch. VERSION is what
# `agentrl --version` prints; the repository's tags are not in the build context.
FROM python:3.11-slim-bookworm

ARG EXTRAS=""
ARG VERSION=""
ENV PYTHONUNBUFFERED=1 \
    SETUPTOOLS_SCM_PRETEND_VERSION_FOR_AGENTRL_MONGO=$VERSION \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/agentrl
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY scripts/constraints.txt scripts/hatch_build.py scripts/
COPY assets assets
COPY examples examples
COPY src src
RUN python -m pip install --constraint scripts/constraints.txt ".${EXTRAS:+[$EXTRAS]}" \
    && useradd --create-home --uid 10001 agentrl \
    # A fresh volume at one of these takes its owner over.
    && install -d -o agentrl -g agentrl output logs

USER 10001
ENTRYPOINT ["agentrl"]
CMD ["--help"]
