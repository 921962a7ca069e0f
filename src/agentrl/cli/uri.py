"""The database that a command works on."""

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


def store_uri(config: RootConfig) -> str:
    """Return the MongoDB URI of the configuration.

    Raises:
        ConfigError: none is given.
    """
    uri = config.store.db_connection_string
    if uri is None:
        raise ConfigError(
            "needs a database: --config output/RUN_NAME/config.yaml of a running run, "
            "--db_connection_string, or MONGODB_URI"
        )
    return uri.get_secret_value()
