"""Decides which registered servers may receive keys: those whose supervisor already has them.

Anyone who can write to the run's database can register an address. A supervisor therefore adds a
proof of each key to its registration: the key's HMAC over the address, which is valid for no other
address.
"""

import hmac
import logging
from collections.abc import Sequence

from pydantic import SecretStr

from agentrl.schema import InferenceService

logger = logging.getLogger(__name__)

_warned_urls: set[str] = set()
"""Addresses of ignored servers that were logged."""


def proof(base_url: str, key: SecretStr | None) -> str | None:
    """Return the proof that the process registering an address knows a key; None without a key."""
    if key is None:
        return None
    return hmac.digest(key.get_secret_value().encode(), base_url.encode(), "sha256").hex()


def with_data_key(
    services: Sequence[InferenceService], key: SecretStr | None
) -> list[InferenceService]:
    """Return the servers that may receive the key of the data routes."""
    return [service for service in services if _has_proof(service, service.data_proof, key)]


def with_control_key(
    services: Sequence[InferenceService], key: SecretStr | None
) -> list[InferenceService]:
    """Return the servers that may receive the key of the control routes."""
    return [service for service in services if _has_proof(service, service.control_proof, key)]


def _has_proof(service: InferenceService, received: str | None, key: SecretStr | None) -> bool:
    expected = proof(service.base_url, key)
    if expected is None or hmac.compare_digest(received or "", expected):
        return True
    if service.base_url not in _warned_urls:
        _warned_urls.add(service.base_url)
        logger.warning(
            "server %s is ignored: the process that registered it does not have this run's key "
            "(AGENTRL_API_KEY, AGENTRL_ADMIN_KEY)",
            service.base_url,
        )
    return False
