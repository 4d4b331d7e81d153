"""AgentScope's chat models of an OpenAI-compatible server, for functions that are written for AgentScope's tuner.

`agentscope`, 1.x or 2.x, is imported when a model is first made. Models do not stream, so that `await model(messages)`
returns the whole answer, and keep their connections until `async with` ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from ratchet.trainer.errors import UserCodeError

_LIST_TIMEOUT = 10.0  # seconds
_NO_KEY = "none"  # clients require a key
_OWN = "ratchet"  # `owned_by` of agents and versions in the proxy's list of models


@dataclass(frozen=True, slots=True)
class ModelServer:
    """An OpenAI-compatible server.

    base_url  with /v1
    api_key   None: the server needs none
    sampling  parameters of every request, by OpenAI's names
    """

    base_url: str
    api_key: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict)


class ChatModels(Mapping[str, Any]):
    """The models of a server by name, each made when it is first used; listed are those of `find_names`."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._names: tuple[str, ...] = ()
        self._made: dict[str, Any] = {}

    async def find_names(self, without: str | None = None) -> None:
        """List the server's models but one; of a proxy, those of `model_list`. Raises UserCodeError."""
        url = f"{self._server.base_url.rstrip('/')}/models"
        headers = {"authorization": f"Bearer {self._server.api_key or _NO_KEY}"}
        try:
            async with httpx.AsyncClient(timeout=_LIST_TIMEOUT, headers=headers) as client:
                cards = (await client.get(url)).raise_for_status().json()["data"]
            names = [str(card["id"]) for card in cards if card.get("owned_by") != _OWN]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserCodeError(
                f"auxiliary_models: {url} names no model ({type(error).__name__}: {error}); correct base_url"
            ) from error
        self._names = tuple(name for name in names if name != without)

    def model(self, name: str) -> Any:
        """Return the model of a name, listed or not."""
        if name not in self._made:
            self._made[name] = _chat_model(name, self._server)
        return self._made[name]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            listed = ", ".join(self._names) or "none"
            raise KeyError(f"no model {name!r} at {self._server.base_url}; it has {listed}: see model_list")
        return self.model(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections, which AgentScope leaves open."""
        for model in self._made.values():
            with suppress(RuntimeError):  # of a client that served another event loop
                await model.client.close()


def _chat_model(name: str, server: ModelServer) -> Any:
    try:
        from agentscope.model import OpenAIChatModel
    except ImportError as error:
        raise UserCodeError(
            f"the function takes AgentScope's models, and agentscope cannot be imported ({error}): install it in this "
            "environment, or take `model: str` and `base_url`"
        ) from error
    sampling = dict(server.sampling)
    if "credential" not in inspect.signature(OpenAIChatModel).parameters:  # AgentScope 1.x
        return OpenAIChatModel(
            model_name=name,
            api_key=server.api_key or _NO_KEY,
            stream=False,
            client_kwargs={"base_url": server.base_url},
            generate_kwargs=sampling,
        )
    from agentscope.credential import OpenAICredential

    named = {key: sampling.pop(key) for key in ("temperature", "top_p", "max_tokens") if key in sampling}
    return OpenAIChatModel(
        credential=OpenAICredential(api_key=server.api_key or _NO_KEY, base_url=server.base_url),
        model=name,
        parameters=OpenAIChatModel.Parameters(**named),
        stream=False,
        extra_body={**sampling.pop("extra_body", {}), **sampling} or None,
    )
