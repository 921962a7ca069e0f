"""The embedded engine as inference server of a run."""

import sys
from collections.abc import Sequence

from agentrl.config.sections import InferenceSection, ModelSection


class EmbeddedBackend:
    """Starts servers of the embedded engine; an `agentrl.inference.supervisor.server_backend`."""

    start_seconds = 120.0

    def command(
        self, common: Sequence[str], *, inference: InferenceSection, model: ModelSection, seed: int
    ) -> list[str]:
        """Return the argv of a server; the engine's flags do not depend on `model`."""
        engine = [sys.executable, "-P", "-m", "agentrl.plugins.engine"]
        return [*engine, *common, "--seed", str(seed), *_embedded_flags(inference)]


EMBEDDED = EmbeddedBackend()


def _embedded_flags(inference: InferenceSection) -> list[str]:
    argv: list[str] = []
    if inference.inference_request_log is not None:
        argv += ["--log-requests", str(inference.inference_request_log)]
    for root in inference.weight_roots:
        argv += ["--weight-root", str(root)]
    if inference.inference_threads is not None:
        argv += ["--num-threads", str(inference.inference_threads)]
    return argv
