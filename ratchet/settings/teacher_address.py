"""The teacher of a `judge: {kind: teacher}` in `model_list`: its address, its key's variable and its price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.errors import SettingsError
from ratchet.proxy.model_list import ModelEntry

_PRICE = "input_cost_per_token"


def with_address(judge: Any, models: Sequence[ModelEntry], key: str) -> Any:
    """Return the judge's setting, of a teacher without `base_url` with what `model_list` says about its model.

    `key` is the setting's name. Raises SettingsError if the model is not listed, or listed more than once.
    """
    if not isinstance(judge, Mapping) or judge.get("kind") != "teacher" or judge.get("base_url") is not None:
        return judge
    name = judge.get("model")
    if not isinstance(name, str):
        return judge  # the trainer's settings say what is wrong with it
    found = [entry.litellm_params for entry in models if entry.model_name == name]
    if not found:
        listed = ", ".join(dict.fromkeys(entry.model_name for entry in models)) or "no model"
        raise SettingsError(
            f"{key}.model: the teacher {name!r} is not in model_list, which has {listed}: add it there as "
            "hosted_vllm/NAME with its api_base, or give judge.base_url"
        )
    if len(found) > 1:
        raise SettingsError(
            f"{key}.model: model_list has {len(found)} entries of the name {name!r}, and a teacher is one server: give "
            "one of them a name of its own"
        )
    (one,) = found
    info = next(entry.model_info for entry in models if entry.model_name == name)
    price = one.input_cost_per_token if one.input_cost_per_token is not None else info.get(_PRICE)
    known: dict[str, Any] = {"base_url": one.base, "api_key_env": one.variable}
    if isinstance(price, int | float):
        known["input_cost_per_million"] = price * 1e6
    return {**known, **{field: value for field, value in judge.items() if value is not None}, "model": one.served_name}
