"""`python -m agentrl` is the `agentrl` command."""

import sys

if not sys.flags.safe_path:
    # Python puts the working directory first, where a user's `random.py` would stand for its own.
    sys.path.append(sys.path.pop(0))

from agentrl.cli.main import main

sys.exit(main())
