"""Models of other servers for the tests of model selection; a model's name gives its share of right answers.

`right-70` answers 70 of 100 sums right, the same ones at every try; `crash` answers 500 to everything.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.harness.tuner.message_text import text_of

_SUM = re.compile(r"(\d+) \+ (\d+)")


class ScriptedModels:
    """The ASGI application; `requests` holds the requested model names, in order."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])

    async def _answer(self, request: Request) -> JSONResponse:
        body = msgspec.json.decode(await request.body())
        model, question = body["model"], text_of(body["messages"])
        self.requests.append(model)
        if model == "crash":
            return JSONResponse({"error": {"message": "the GPU fell out", "type": "server_error"}}, 500)
        return JSONResponse(_completion(model, answer_of(model, question)))


def answer_of(model: str, question: str) -> str:
    """Return a model's answer to a question."""
    found = _SUM.search(question)
    assert found is not None, question
    right = int(found[1]) + int(found[2])
    share = int(model.removeprefix("right-"))
    luck = int.from_bytes(blake2b(f"{model} {question}".encode(), digest_size=4).digest()) % 100
    return str(right if luck < share else right + 1)


def _completion(model: str, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
    }  # fmt: skip


def entry(url: str, name: str, info: dict[str, float] | None = None) -> dict[str, Any]:
    """Return one model as an entry of model_list."""
    return {
        "model_name": name, "litellm_params": {"model": f"openai/{name}", "api_base": url}, "model_info": info or {}
    }  # fmt: skip
