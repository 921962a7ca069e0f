"""A small task in Harbor's format."""

from pathlib import Path

TOML = """
schema_version = "1.4"
[metadata]
category = "files"
difficulty = "easy"
[agent]
timeout_sec = 30
[verifier]
timeout_sec = 10
env = { WANTED = "hello" }
[environment]
memory_mb = 512
network_mode = "no-network"
env = { GREETING = "hello" }
"""
TEST = """
mkdir -p /logs/verifier
if [ "$(cat /app/greeting.txt)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, toml: str = TOML, test: str = TEST, dockerfile: str = "") -> Path:
    for place in ("tests", "environment"):
        (folder / place).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write hello into greeting.txt.\n")
    (folder / "tests/test.sh").write_text(test)
    (folder / "environment/data.txt").write_text("given")
    if dockerfile:
        (folder / "environment/Dockerfile").write_text(dockerfile)
    return folder
