"""Starts SGLang with keys from its environment: `AGENTRL_API_KEY` and `AGENTRL_ADMIN_KEY`.

SGLang takes keys as arguments, where every user of the machine can read them. It also logs its
arguments and returns them from `/server_info` to everyone with the API key, which would reveal the
admin key. This program installs SGLang's own key middleware with the keys and leaves them out of
the arguments, which are otherwise SGLang's. It runs in SGLang's interpreter and does not import
AgentRL.
"""

import os
import runpy
import sys


def main() -> None:
    """Serve until a signal ends it."""
    # Removed before SGLang starts its own processes, which would inherit them.
    api_key = os.environ.pop("AGENTRL_API_KEY", None)
    admin_key = os.environ.pop("AGENTRL_ADMIN_KEY", None)
    if api_key or admin_key:
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.utils.auth import add_api_key_middleware

        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_key)
        # The warm-up calls the server's own routes without a key, and its failure would stop the
        # server.
        sys.argv.append("--skip-server-warmup")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
