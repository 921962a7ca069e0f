"""An OpenAI-compatible service in place of a hosted model: it repeats its input.

python -m examples.shop.editor --port 8766
"""

import argparse
import time

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def complete(request: Request) -> JSONResponse:
    """Answer `/v1/chat/completions` with the text of the last message."""
    body = await request.json()
    content = body["messages"][-1]["content"]
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    message = {"role": "assistant", "content": content or "(nothing)"}
    return JSONResponse(
        {
            "id": "chatcmpl-editor",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }
    )


def main() -> None:
    """Parse the command line and serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8766)
    app = Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    port = parser.parse_args().port
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
