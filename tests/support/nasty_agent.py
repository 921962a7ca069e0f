"""An agent description with everything that breaks careless generators of files."""

from pathlib import Path
from typing import Any

import yaml

TOKEN = "tok-5f2a91c7e4"
KEY = "sk-planted-7d1e"
PROMPT = (
    "Say \"yes\" or 'no' — naïve, 東京, 🙂.\n"
    "'''triple''' and \"\"\"triple\"\"\", {braces}, ${NOT_A_VARIABLE}, %s, \\n, # no comment: x\n\ttab"
)


def agent_arguments(url: str = "http://127.0.0.1:1/mcp") -> dict[str, Any]:
    """Return the arguments of an agent, as its YAML file has them."""
    return {
        "name": 'the "Größe" agent',
        "system_prompt": PROMPT,
        "conf": {"llm_config": {"llm_temperature": 0.5, "llm_api_key": KEY}},
        "mcp_config": {
            "mcpServers": {
                "shop": {
                    "type": "streamable-http",
                    "url": url,
                    "headers": {"Authorization": f"Bearer {TOKEN}", "MCP_SERVERS": "a,b"},
                    "env": {"MAPS_API_KEY": KEY},
                }
            }
        },
    }


def write_agent(folder: Path, **changes: Any) -> Path:
    """Write it to a YAML file."""
    path = folder / "nasty.yaml"
    path.write_text(yaml.safe_dump({**agent_arguments(), **changes}, allow_unicode=True), "utf-8")
    return path
