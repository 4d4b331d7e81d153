"""Workflows and judges that are written for AgentScope's tuner, as functions of Ratchet's own parameters.

Such a function is known by its parameters: `model: ChatModelBase`, `auxiliary_models` (a mapping of names to such
models) or `logger`. It has to be async, as AgentScope's are.

`agentscope`, 1.x or 2.x, is imported when a model is first made. Models do not stream, so that `await model(messages)`
returns the whole answer, and keep their connections until `async with` ends.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import httpx

from ratchet.trainer.errors import NotCallable, TrainerError
from ratchet.trainer.user_code import ModelServer, accepted_parameters, is_async

log = logging.getLogger(__name__)

AUXILIARY, LOGGER = "auxiliary_models", "logger"
_CHAT_MODEL = re.compile(r"\bChatModelBase\b|\bagentscope\.model\b")
_ADDRESS = ("base_url", "api_key", "model")  # what a workflow's model is made from
_LIST_TIMEOUT = 10.0  # seconds
_NO_KEY = "none"  # clients require a key
_OWN = "ratchet"  # `owned_by` of agents and versions in the proxy's list of models


def adapted_workflow(
    function: Callable[..., Any],
    parameters: Sequence[str],
    *,
    always: bool = False,
    sampling: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return a workflow that takes names of `parameters`; one that is not for AgentScope is returned as it is.

    always    also if only its `model` without a type says that it is for AgentScope
    sampling  parameters of the tuned model's requests

    Raises NotCallable.
    """
    names = _parameters(function)
    makes_model = _takes_chat_model(names, always)
    if not makes_model and not {AUXILIARY, LOGGER} & names.keys():
        return function
    accepted = _accepted(function, parameters)

    async def workflow(**given: Any) -> Any:
        base_url, api_key, name = (given[part] for part in _ADDRESS)
        async with (
            ChatModels(ModelServer(base_url, api_key), sampling) as models,
            ChatModels(ModelServer(base_url, api_key)) as auxiliary,
        ):
            if AUXILIARY in names:
                await auxiliary.find_names(without=name)
            values = {**given, AUXILIARY: auxiliary, LOGGER: log}
            if makes_model:
                values["model"] = models.model(name)
            return await accepted.call(function, values)

    return _named(workflow, function, {*accepted.positional, *accepted.by_name, *_ADDRESS}.intersection(parameters))


def adapted_judge(
    function: Callable[..., Any], parameters: Sequence[str], server: ModelServer | None
) -> Callable[..., Any]:
    """Return a judge that takes names of `parameters`; one that is not for AgentScope is returned as it is.

    Raises NotCallable.
    """
    names = _parameters(function)
    if not {AUXILIARY, LOGGER} & names.keys():
        return function
    if server is None and AUXILIARY in names and names[AUXILIARY].default is inspect.Parameter.empty:
        raise NotCallable(
            f" takes `{AUXILIARY}`, and no server of models is known: give base_url, in settings as "
            "{kind: function, function: ..., base_url: ...} (docs/judges.md)"
        )
    accepted = _accepted(function, parameters)

    async def judge(**given: Any) -> Any:
        if server is None or AUXILIARY not in names:
            return await accepted.call(function, {**given, AUXILIARY: None, LOGGER: log})
        async with ChatModels(server) as models:
            await models.find_names()
            return await accepted.call(function, {**given, AUXILIARY: models, LOGGER: log})

    return _named(judge, function, {*accepted.positional, *accepted.by_name}.intersection(parameters))


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError) as error:
        raise NotCallable(f": its parameters are unknown: {error}") from error


def _takes_chat_model(parameters: Mapping[str, inspect.Parameter], always: bool) -> bool:
    if "model" not in parameters:
        return False
    annotation = parameters["model"].annotation
    if annotation is inspect.Parameter.empty:
        return always or AUXILIARY in parameters
    return bool(_CHAT_MODEL.search(inspect.formatannotation(annotation)))


def _accepted(function: Callable[..., Any], parameters: Sequence[str]) -> Any:
    if not is_async(function):
        raise NotCallable(" takes AgentScope's models, which are awaited: declare it with `async def`")
    return accepted_parameters(function, (*parameters, AUXILIARY, LOGGER))


def _named(adapted: Callable[..., Any], function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Give the adapted function the other one's name, and a signature of the names that it takes."""
    functools.update_wrapper(adapted, function)
    keyword = inspect.Parameter.KEYWORD_ONLY
    vars(adapted)["__signature__"] = inspect.Signature([inspect.Parameter(name, keyword) for name in sorted(names)])
    return adapted


class ChatModels(Mapping[str, Any]):
    """The models of a server by name, each made when it is first used; listed are those of `find_names`.

    `sampling`: parameters of every request, by OpenAI's names.
    """

    def __init__(self, server: ModelServer, sampling: Mapping[str, Any] | None = None) -> None:
        self._server = server
        self._sampling = sampling or {}
        self._names: tuple[str, ...] = ()
        self._made: dict[str, Any] = {}

    async def find_names(self, without: str | None = None) -> None:
        """List the server's models but one; of a proxy, those of `model_list`. Raises TrainerError."""
        url = f"{self._server.base_url.rstrip('/')}/models"
        headers = {"authorization": f"Bearer {self._server.api_key or _NO_KEY}"}
        try:
            async with httpx.AsyncClient(timeout=_LIST_TIMEOUT, headers=headers) as client:
                cards = (await client.get(url)).raise_for_status().json()["data"]
            names = [str(card["id"]) for card in cards if card.get("owned_by") != _OWN]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainerError(
                f"auxiliary_models: {url} names no model ({type(error).__name__}: {error}); correct base_url"
            ) from error
        self._names = tuple(name for name in names if name != without)

    def model(self, name: str) -> Any:
        """Return the model of a name, listed or not."""
        if name not in self._made:
            self._made[name] = _chat_model(name, self._server, dict(self._sampling))
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


def _chat_model(name: str, server: ModelServer, sampling: dict[str, Any]) -> Any:
    try:
        from agentscope.model import OpenAIChatModel
    except ImportError as error:
        raise TrainerError(
            f"the function takes AgentScope's models, and agentscope cannot be imported ({error}): install it in this "
            "environment, or take `model: str` and `base_url`"
        ) from error
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
