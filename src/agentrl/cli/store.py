"""`agentrl store up|set|rescore`."""

import signal
import threading
from collections.abc import Sequence

from agentrl.config.loading import parse_flags
from agentrl.errors import ConfigError, StoreError


def main(argv: Sequence[str]) -> int:
    """Do one of the things that concern a run's database."""
    action, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("--") else ("", argv)
    if action == "up":
        return _up(flags)
    if action == "set":
        from agentrl.cli.control import main as set_control

        return set_control(flags)
    if action == "rescore":
        from agentrl.cli.rescore import main as rescore

        return rescore(flags)
    parse_flags(flags)  # a misspelled flag is worth more than what follows
    raise ConfigError(
        "say `agentrl store up`, `agentrl store set KEY VALUE` or "
        "`agentrl store rescore --scorer NAME`, each with --run_name NAME"
    )


def _up(flags: Sequence[str]) -> int:
    """Serve the data of a run's private mongod until Ctrl-C, for looking into them."""
    config = parse_flags(flags)
    from agentrl.launcher.stage import mongo_data_dir
    from agentrl.store.embedded import EmbeddedMongo, running_uri

    data_dir = mongo_data_dir(config)
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
