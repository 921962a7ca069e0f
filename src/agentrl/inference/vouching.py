"""Decides which registered servers may receive keys: those whose supervisor already knew them.

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

_told: set[str] = set()


def proof(base_url: str, key: SecretStr | None) -> str | None:
    """Return the proof that the process registering an address knows a key; None without a key."""
    if key is None:
        return None
    return hmac.digest(key.get_secret_value().encode(), base_url.encode(), "sha256").hex()


def with_data_key(
    services: Sequence[InferenceService], key: SecretStr | None
) -> list[InferenceService]:
    """Return the servers that may receive the key of the data routes."""
    return [it for it in services if _is_proved(it, it.data_proof, key)]


def with_control_key(
    services: Sequence[InferenceService], key: SecretStr | None
) -> list[InferenceService]:
    """Return the servers that may receive the key of the control routes."""
    return [it for it in services if _is_proved(it, it.control_proof, key)]


def _is_proved(service: InferenceService, given: str | None, key: SecretStr | None) -> bool:
    wanted = proof(service.base_url, key)
    if wanted is None or hmac.compare_digest(given or "", wanted):
        return True
    if service.base_url not in _told:
        _told.add(service.base_url)
        logger.warning(
            "server %s is ignored: the process that registered it does not have this run's key "
            "(AGENTRL_API_KEY, AGENTRL_ADMIN_KEY)",
            service.base_url,
        )
    return False
