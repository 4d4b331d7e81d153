"""Models of `model_list` as judges, teachers and reflection models: address, variable of the key, and prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.errors import SettingsError
from ratchet.proxy.model_list import ModelEntry
from ratchet.trainer.settings.judge_specs import plugin_traits

_PRICES = ("input_cost_per_token", "output_cost_per_token")
_MODEL_KINDS = ("teacher", "ruler")


def judge_with_address(judge: Any, models: Sequence[ModelEntry], key: str) -> Any:
    """Return a judge's setting with the addresses of the models that it names without `base_url`, its parts' too.

    `key` is the setting's name. Raises SettingsError if a model is not named, not listed, or listed more than once.
    """
    if not isinstance(judge, Mapping):
        return judge
    kind = judge.get("kind")
    if kind in _MODEL_KINDS or (isinstance(kind, str) and plugin_traits(kind).asks_model):
        if judge.get("model") is None and judge.get("base_url") is None:
            raise SettingsError(
                f"{key}.model: field required: name a model of model_list (it has {_listed(models)}), or one that the "
                f"server at {key}.base_url serves"
            )
        return with_address(judge, models, key)
    if kind == "composite" and isinstance(parts := judge.get("parts"), Sequence):
        places = [f"{key}.parts.{number}" for number in range(len(parts))]
        return {**judge, "parts": [_with_inner(part, models, at) for part, at in zip(parts, places, strict=True)]}
    if kind == "by_family" and isinstance(judges := judge.get("judges"), Mapping):
        inner = {name: judge_with_address(one, models, f"{key}.judges.{name}") for name, one in judges.items()}
        return {**judge, "judges": inner, "other": judge_with_address(judge.get("other"), models, f"{key}.other")}
    return judge


def _with_inner(part: Any, models: Sequence[ModelEntry], key: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {**part, "judge": judge_with_address(part.get("judge"), models, f"{key}.judge")}


def with_address(setting: Any, models: Sequence[ModelEntry], key: str) -> Any:
    """Return the setting of a model without `base_url` with what `model_list` says about it; what is given wins.

    `key` is the setting's name. Raises SettingsError if the model is not listed, or listed more than once.
    """
    if not isinstance(setting, Mapping) or setting.get("base_url") is not None:
        return setting
    name = setting.get("model")
    if not isinstance(name, str):
        return setting  # the component's settings say what is wrong with it
    what = "teacher" if setting.get("kind") == "teacher" else "model"
    entry = _entry_of(name, models, key, what)
    one = entry.litellm_params
    known: dict[str, Any] = {"base_url": one.base, "api_key_env": one.variable}
    for price in _PRICES[:1] if what == "teacher" else _PRICES:
        cost = getattr(one, price) if getattr(one, price) is not None else entry.model_info.get(price)
        if isinstance(cost, int | float):
            known[price.replace("per_token", "per_million")] = cost * 1e6
    given = {field: value for field, value in setting.items() if value is not None}
    return {**known, **given, "model": one.served_name}


def _entry_of(name: str, models: Sequence[ModelEntry], key: str, what: str) -> ModelEntry:
    found = [entry for entry in models if entry.model_name == name]
    if not found:
        provider = "hosted_vllm/NAME" if what == "teacher" else "openai/NAME"
        raise SettingsError(
            f"{key}.model: the {what} {name!r} is not in model_list, which has {_listed(models)}: add it there as "
            f"{provider} with its api_base, or give {key}.base_url"
        )
    if len(found) > 1:
        raise SettingsError(
            f"{key}.model: model_list has {len(found)} entries of the name {name!r}, and a {what} is one server: give "
            "one of them a name of its own"
        )
    return found[0]


def _listed(models: Sequence[ModelEntry]) -> str:
    return ", ".join(dict.fromkeys(entry.model_name for entry in models)) or "no model"
