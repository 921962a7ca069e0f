"""Reads a Prometheus endpoint."""

import asyncio
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support.patience import PATIENCE

from agentrl.runtime.telemetry.prometheus import KEY_FILE

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int, output: Path) -> Samples:
    """Return (name, labels) -> value with the key of an output folder; nothing while nobody answers."""
    try:
        key = (output / KEY_FILE).read_text()
        url, keys = f"http://127.0.0.1:{port}/metrics", {"Authorization": f"Bearer {key}"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=keys), timeout=5) as answer:
            text = answer.read().decode()
    except OSError:  # no key yet, refused, reset or too slow
        return {}
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape_until(port: int, output: Path, name: str, value: float, **labels: str) -> Samples:
    """Scrape until a sample has reached a value."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = await asyncio.to_thread(scrape, port, output)
            if found.get((name, tuple(sorted(labels.items()))), float("-inf")) >= value:
                return found
            await asyncio.sleep(0.1)
