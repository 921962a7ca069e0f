"""Reads a Prometheus endpoint."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from support.patience import PATIENCE

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int) -> Samples:
    """Return (name, labels) -> value; nothing while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:  # refused, reset or too slow
        return {}
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape_until(port: int, name: str, value: float, **labels: str) -> Samples:
    """Scrape until a sample has reached a value."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = await asyncio.to_thread(scrape, port)
            if found.get((name, tuple(sorted(labels.items()))), float("-inf")) >= value:
                return found
            await asyncio.sleep(0.1)
