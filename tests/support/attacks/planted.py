"""Settings with secrets in every place that takes one: `plant-NN`, each once."""

import json

PLANTED = {
    "agent": "agent.py:run",
    "db_connection_string": "mongodb://ada:plant-01@db/x?tls=true&tlsCertificateKeyFilePassword=plant-02"
    "&authMechanismProperties=AWS_SESSION_TOKEN:plant-03",
    "mcp_servers": json.dumps(
        {
            "web": {
                "url": "https://plant-04:plant-05@tools/mcp?key=plant-06",
                "headers": {"X-A": "plant-07"},
            },
            "own": {
                "command": "npx",
                "args": ["server", "--token", "plant-08"],
                "env": {"A": "plant-09"},
            },
        }
    ),
    "evaluated_route": json.dumps(
        {"base_url": "https://u:plant-12@big/v1?k=plant-13", "model": "big"}
    ),
    "inference_api_key": "plant-14",
    "inference_admin_key": "plant-15",
    "mcp_auth_token": "plant-16",
}
COMMAND = {"tool_server_command": "tools --port {port} --api-key plant-17 TOKEN=plant-18"}
