# One image for samplers, trainer, keepers and the tools' environment. From the repository's root:
#   docker build -f deploy/images/agentrl.Dockerfile -t agentrl --build-arg EXTRAS=engine,train .
# EXTRAS may be left empty for samplers and environments, which need no torch.
FROM python:3.11-slim-bookworm

ARG EXTRAS=""
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/agentrl
COPY pyproject.toml README.md ./
COPY scripts/constraints.txt scripts/constraints.txt
COPY src src
RUN python -m pip install --constraint scripts/constraints.txt ".${EXTRAS:+[$EXTRAS]}" \
    && useradd --create-home --uid 10001 agentrl \
    # A fresh volume at one of these takes its owner over.
    && install -d -o agentrl -g agentrl output logs
COPY assets assets
COPY examples examples

USER 10001
ENTRYPOINT ["agentrl"]
CMD ["--help"]
