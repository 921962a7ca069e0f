"""`agentrl store`: serve, measure, tidy up, copy and delete what a run left in its database."""

import signal
import threading
from collections.abc import Sequence

from agentrl.cli.arguments import Action, Asked, parse_action
from agentrl.errors import StoreError

ACTIONS = {
    "up": Action("serve a private mongod's data until Ctrl-C, for looking into them"),
}


def main(argv: Sequence[str]) -> int:
    """Do what was asked for."""
    asked = parse_action("store", ACTIONS, argv)
    return _up(asked)


def _up(asked: Asked) -> int:
    from agentrl.store.embedded import EmbeddedMongo, running_uri

    config = asked.config
    data_dir = config.private_mongo_dir
    if not data_dir.is_dir():
        raise StoreError(f"{data_dir} does not exist; is {config.run.run_name!r} the run's name?")
    running = running_uri(data_dir)
    if running is not None:
        print(f"the run is going on and its mongod is up: {running}")
        return 0
    with EmbeddedMongo(data_dir, config.store.mongo_port) as mongo:
        print(f"{mongo.uri(config.run.run_name)}\nCtrl-C ends it; the data stay.", flush=True)
        stop = threading.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: stop.set())
        stop.wait()
    return 0
