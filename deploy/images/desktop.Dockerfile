# The tool environment with a display and a browser for each session, and the research servers.
#   docker build -f deploy/images/environment.Dockerfile -t agentrl-environment .
#   docker build -f deploy/images/desktop.Dockerfile -t agentrl-desktop .
#   docker run -p 127.0.0.1:8000:8000 -p 127.0.0.1:5901:5901 \
#     -e MCP_SERVER_TOKEN -e DESKTOP_VIEW_PASSWORD agentrl-desktop
# ENVIRONMENT_IMAGE may include a digest.
ARG ENVIRONMENT_IMAGE=agentrl-environment
FROM ${ENVIRONMENT_IMAGE}
USER 0
COPY scripts/install_desktop /usr/local/bin/install_desktop
RUN install_desktop --required --research /opt/research \
    && rm -rf /var/lib/apt/lists/*
COPY examples/desktop /opt/desktop/examples/desktop
COPY deploy/images/desktop.json /etc/agentrl/servers.json
ENV PATH=/opt/research/bin:$PATH
USER 10001
EXPOSE 5901
