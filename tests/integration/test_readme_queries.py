"""The queries that the pages print return rows in mongosh, as people would type them."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.doc_blocks import documented_queries
from support.stored import claim, make_task, play

from agentrl.schema import Run
from agentrl.store import TrajectoryStore

MONGOSH = "mongosh@2.12.0"
NPM_FLAGS = ("--no-audit", "--no-fund", "--ignore-scripts")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"

# Installing mongosh takes a minute or two the first time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def mongosh() -> Path:
    """The mongosh of npm, installed into the user's cache directory."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm and node are not installed, so there is no mongosh to run")
    home = CACHE / MONGOSH.replace("@", "-")
    if not home.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        staging = home.with_name(f".{home.name}.{os.getpid()}")
        done = subprocess.run(
            ["npm", "install", *NPM_FLAGS, "--prefix", str(staging), MONGOSH],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(staging, ignore_errors=True)
            pytest.skip(f"npm cannot install {MONGOSH}: {done.stderr.strip().splitlines()[-1]}")
        staging.rename(home)
    return home / "node_modules/.bin/mongosh"


async def test_every_documented_query_returns_rows(
    store: TrajectoryStore, mongo_uri: str, mongosh: Path, tmp_path: Path
) -> None:
    await store.runs.create(Run(name=store.database_name))
    await store.tasks.add([make_task(0)])
    ids = [(await play(store, await claim(store), num_turns=2)).id for _ in range(2)]
    await store.ledger.reserve("trainer", ids, 1)
    await store.ledger.commit("trainer", 1)

    queries = documented_queries()
    assert len(queries) >= 6
    script = tmp_path / "queries.js"
    script.write_text(
        "\n".join(
            f"print({query})" if "countDocuments" in query else f"print(({query}).toArray().length)"
            for query in queries
        )
    )
    settings = tmp_path / ".mongodb/mongosh/config"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"enableTelemetry": False}))
    done = subprocess.run(
        [str(mongosh), mongo_uri, "--quiet", "--norc", "--file", str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == len(queries)
    for query, count in zip(queries, counts, strict=True):
        assert count > 0, query
