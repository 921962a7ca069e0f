"""Measures the cost of untrusted texts, files and settings: reply parsers, question files, addresses."""

import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness.apart import Meter, apart
from harness.attacks.addresses import PRIVATE
from harness.attacks.files import (
    endless_element,
    endless_line,
    parquet_bomb,
    pipe,
    repeated_cells,
)
from harness.attacks.planted import COMMAND, PLANTED
from harness.attacks.texts import DEEPSEEK_CALL, READERS, hostile_texts, repeated

from agentrl.config.loading import build_config, flat_values, write_config
from agentrl.config.sections import DataSection
from agentrl.datasets.question_files import load_questions
from agentrl.errors import DatasetError, RenderError
from agentrl.rollout.image_library import ImageLibrary

SCANNED_CHARS, LONG_CHARS = 16_000, 64_000
SLOWEST = 3
"""Number of texts per reader whose growth is measured."""
REPEATS = 3
NAMED: dict[str, tuple[str, str, str, int]] = {
    "deepseek": ("deepseekv3", DEEPSEEK_CALL, " ", 1_600),
    "boxed": ("boxed", "", "\\boxed{", 14_000),
    "mistral": ("mistral", "[TOOL_CALLS]name", " ", 200_000),
    "judge": ("verdict", "```", " ", 200_000),
    "think": ("thinking", "", "<think>", 200_000),
    "think_end": ("thinking", "", "</think>", 200_000),
    "answer": ("answer", "", "<answer>", 200_000),
}
"""Texts of the earlier measurement: reader, beginning, repeated part, and length in characters."""


def readers() -> dict[str, Any]:
    """Return the milliseconds of the named texts, and how time grows with any text's length."""
    found: dict[str, Any] = {}
    for name, (reader, begin, piece, size) in NAMED.items():
        make: Callable[[int], str] = partial(_text, begin, piece)
        found[f"{name}_ms"] = round(1000 * _seconds(reader, make(size)), 2)
        found[f"{name}_growth"] = _growth(reader, make, max(size, LONG_CHARS))
    worst = 0.0
    num_texts = 0
    for reader, (_, marks) in READERS.items():
        scanned = [
            (_seconds(reader, text(SCANNED_CHARS), 1), text) for _, text in hostile_texts(marks)
        ]
        num_texts += len(scanned)
        scanned.sort(key=lambda one: one[0], reverse=True)
        for _, text in scanned[:SLOWEST]:
            worst = max(worst, _growth(reader, text, LONG_CHARS))
    return {**found, "texts": num_texts, "readers": len(READERS), "largest_growth": worst}


def _text(begin: str, piece: str, size: int) -> str:
    return begin + repeated(piece, size - len(begin))


def _growth(reader: str, make: Callable[[int], str], size: int) -> float:
    once, twice = (_seconds(reader, make(factor * size)) for factor in (1, 2))
    return round(twice / once, 2)


def _seconds(reader: str, text: str, repeats: int = REPEATS) -> float:
    read, _ = READERS[reader]
    seconds = []
    for _ in range(repeats):
        started = time.thread_time()
        read(text)
        seconds.append(time.thread_time() - started)
    return min(seconds)


async def _load(meter: Meter, path: Path) -> dict[str, Any]:
    with meter:
        try:
            load_questions(path, DataSection())
        except DatasetError as error:
            return {"refused": str(error)}
    return {"refused": ""}


def question_files() -> dict[str, Any]:
    """Return seconds and megabytes until each hostile question file is refused."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digits = folder / "digits.jsonl"
        digits.write_text('{"question": "x", "answer": ' + "9" * 5000 + "}\n")
        image = folder / "image.jsonl"
        image.write_text('{"question": "x", "answer": "y", "image": "/dev/zero"}\n')
        attacks = {"digits": digits, "image": image, "device": Path("/dev/zero")}
        makers = (pipe, endless_line, endless_element, parquet_bomb, repeated_cells)
        for path in [*attacks.values(), *(make(folder) for make in makers)]:
            found[path.name.partition(".")[0]] = apart(_load, path)
    refused = [one for one in found.values() if one["refused"]]
    return {
        "tried": len(found),
        "refused": len(refused),
        "seconds": max(one["seconds"] for one in found.values()),
        "megabytes": max(one["megabytes"] for one in found.values()),
        "line_seconds": found["line"]["seconds"],
        "line_megabytes": found["line"]["megabytes"],
        "files": found,
    }


async def _keep_images(meter: Meter) -> dict[str, Any]:
    refused = 0
    with meter:
        for address in PRIVATE:
            host = f"[{address.replace('%', '%25')}]" if ":" in address else address
            # The image is refused before anything is stored, so no store is needed.
            library = ImageLibrary(None, 1000)  # type: ignore[arg-type]
            try:
                await library.keep([f"http://{host}/image"])
            except RenderError as error:
                refused += "not a public address" in str(error)
    return {"tried": len(PRIVATE), "refused": refused}


def image_addresses() -> dict[str, Any]:
    """Return how many addresses of private networks are refused before anything is sent there."""
    return apart(_keep_images)


def planted_secrets() -> dict[str, Any]:
    """Return how many planted secrets occur in output that everybody can read."""
    found: set[str] = set()
    planted = re.findall(r"plant-\d+", str(PLANTED) + str(COMMAND))
    with tempfile.TemporaryDirectory() as folder:
        for number, values in enumerate((PLANTED, COMMAND)):
            config = build_config(values)
            path = Path(folder) / str(number) / "config.yaml"
            write_config(config, path)
            texts = (path.read_text(), str(flat_values(config)), repr(config))
            found |= {word for text in texts for word in re.findall(r"plant-\d+", text)}
    return {"planted": len(set(planted)), "found": len(found)}


if __name__ == "__main__":
    print(readers(), question_files(), image_addresses(), planted_secrets(), sep="\n")
