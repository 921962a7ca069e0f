"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

_DISTRIBUTION = "agentrl-mongo"
_UNKNOWN = "0+unknown"


def package_version() -> str:
    """Return the version; a checkout that is not installed has none."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return _UNKNOWN
