"""Starts SGLang with keys from its environment: `AGENTRL_API_KEY` and `AGENTRL_ADMIN_KEY`.

SGLang takes keys as arguments, where every user of the machine can read them. It also writes its
arguments into its log and tells them at `/server_info` to whoever has the API key, so that this key
would give away the admin key. Here SGLang's own check of keys is given the keys, and SGLang's
arguments have none. The arguments of this program are SGLang's.
"""

import os
import runpy
import sys


def main() -> None:
    """Serve until a signal ends it."""
    # Out of the environment before SGLang starts processes of its own, which need none.
    api_key = os.environ.pop("AGENTRL_API_KEY", None)
    admin_key = os.environ.pop("AGENTRL_ADMIN_KEY", None)
    if api_key or admin_key:
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.utils.auth import add_api_key_middleware

        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_key)
        # The warm-up would ask the server's own routes without a key, and give the server up.
        sys.argv.append("--skip-server-warmup")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
