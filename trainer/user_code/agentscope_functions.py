"""Workflows and judges that are written for AgentScope's tuner, as functions of Ratchet's own parameters.

Such a function is known by its parameters: `model: ChatModelBase`, `auxiliary_models` (a mapping of names to such
models) or `logger`. It has to be async, as AgentScope's are.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ratchet.trainer.errors import NotCallable
from ratchet.trainer.user_code.agentscope_models import ChatModels, ModelServer
from ratchet.trainer.user_code.entry_points import accepted_parameters, is_async

log = logging.getLogger(__name__)

AUXILIARY, LOGGER = "auxiliary_models", "logger"
_CHAT_MODEL = re.compile(r"\bChatModelBase\b|\bagentscope\.model\b")
_ADDRESS = ("base_url", "api_key", "model")  # what a workflow's model is made from


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
            ChatModels(ModelServer(base_url, api_key, sampling or {})) as models,
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
