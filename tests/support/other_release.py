"""`agentrl` of another release: with its own version and schema.

Arguments: the version, its schema version, the oldest schema version whose processes may work on
documents of that schema, and a command line of agentrl.
"""

import sys
from pathlib import Path

PROGRAM = Path(__file__)


async def _change_nothing(database: object) -> None:
    """Migrate to a schema that only adds fields with defaults."""


if __name__ == "__main__":
    from agentrl.runtime import package_version

    release, schema_version, readable_since = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # Before the rest of agentrl imports it.
    package_version.package_version = lambda: release
    from agentrl.cli.main import main
    from agentrl.schema import SCHEMA_VERSION
    from agentrl.store.repositories import schema_versions

    for version in range(SCHEMA_VERSION, schema_version):
        migration = schema_versions.Migration(_change_nothing, readable_since)
        schema_versions.MIGRATIONS[version] = migration
    vars(schema_versions)["SCHEMA_VERSION"] = schema_version
    del sys.argv[1:4]
    sys.exit(main())
