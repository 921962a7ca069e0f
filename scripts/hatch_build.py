"""Build hook: puts the files that AgentRL ships into the wheel, below `agentrl/_data`.

`assets/` and `examples/` stay at the top of the repository, where users look for them, and
`agentrl.config.named_files` finds them in either place. An editable install needs no copy.
"""

from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = (
    "assets/agent_config.yml",
    "assets/demo",
    "assets/fsdp2_dst.yml",
    "examples",
)


class ShippedFiles(BuildHookInterface[BuilderConfig]):
    """Maps the shipped files into a standard wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to the package that hatchling builds.

        Args:
            version: `standard`, or `editable` for an installation that points at the checkout.
            build_data: what hatchling is about to package; changed in place.
        """
        if version == "standard":
            build_data["force_include"].update({path: f"agentrl/_data/{path}" for path in SHIPPED})
