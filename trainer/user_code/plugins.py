"""Plug-ins: features that an installed distribution registers as Python entry points.

The groups are the constants below; what each expects: docs/plugins.md. Ratchet's own plug-ins (plugins/) are
distributions that are registered and loaded the same way.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from ratchet.store.errors import install_hint, plugin_hint
from ratchet.trainer.errors import PluginError

JUDGES: Final = "ratchet.judges"
PROMPT_OPTIMIZERS: Final = "ratchet.prompt_optimizers"
EVALUATIONS: Final = "ratchet.evaluations"  # commands below `ratchet eval`
TUNE_COMMANDS: Final = "ratchet.tune_commands"
MONITORS: Final = "ratchet.monitors"
MODEL_CARDS: Final = "ratchet.model_cards"
TASK_SOURCES: Final = "ratchet.task_sources"
OBJECTIVE_PLUGINS: Final = "ratchet.objectives"
ADVANTAGE_ESTIMATORS: Final = "ratchet.advantage_estimators"
FUNCTION_ADAPTERS: Final = "ratchet.function_adapters"
# What Ratchet's own plug-ins register: name -> folder of plugins/, by group.
OWN_PLUGINS: Final[dict[str, dict[str, str]]] = {
    JUDGES: {"behavior": "judges", "next_state": "judges", "openjudge": "openjudge"},
    MODEL_CARDS: {"readme": "model-card"},
    MONITORS: {"tensorboard": "tensorboard", "wandb": "wandb"},
    OBJECTIVE_PLUGINS: {"dpo": "preference", "apo_zero_unpaired": "preference"},
    EVALUATIONS: {"bfcl": "bfcl"},
    FUNCTION_ADAPTERS: {"agentscope": "agentscope"},
    PROMPT_OPTIMIZERS: {"mipro": "mipro"},
    TASK_SOURCES: {"verifiers": "verifiers"},
    TUNE_COMMANDS: {"lessons": "lessons"},
}


def plugin_names(group: str) -> list[str]:
    """Return the names registered in a group, sorted. Imports none of them."""
    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any:
    """Import a plug-in and return the object that its entry point names. Raises PluginError."""
    points = list({point.value: point for point in entry_points(group=group, name=name)}.values())
    if not points:
        installed = ", ".join(plugin_names(group)) or "none"
        raise PluginError(
            f"no plug-in {name!r} in the entry-point group {group} (installed: {installed}): "
            f"{missing_plugin_remedy(group, name)}"
        )
    if len(points) > 1:
        owners = " and ".join(sorted(_distribution(point) for point in points))
        raise PluginError(f"plug-in {name!r} of the group {group} is registered by {owners}: uninstall one of them")
    point = points[0]
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # a plug-in's import may fail in any way
        raise PluginError(
            f"plug-in {name!r} of the group {group} ({point.value.partition('[')[0].strip()}, from "
            f"{_distribution(point)}) cannot be imported: "
            f"{type(error).__name__}: {error}; {_remedy(point, error)}"
        ) from error


def missing_plugin_remedy(group: str, name: str) -> str:
    """Return the clause that says what to do about a plug-in that is not installed."""
    if folder := OWN_PLUGINS.get(group, {}).get(name):
        return plugin_hint(folder)
    return "correct the name, or install the distribution that registers it into this Python environment"


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"


def _remedy(point: EntryPoint, error: BaseException) -> str:
    name = point.dist.name if point.dist is not None else "its distribution"
    _, bracket, extra = point.value.partition("[")  # EntryPoint.extras splits names at hyphens
    if bracket and name == "ratchet-rl":
        return install_hint(extra.removesuffix("]"))
    if bracket:
        return f"install the extra: pip install '{name}[{extra}'"
    if isinstance(error, ModuleNotFoundError) and name.startswith("ratchet-rl-"):
        return plugin_hint(name.removeprefix("ratchet-rl-"))
    if isinstance(error, ModuleNotFoundError):
        return f"install the missing module, or update {name}"
    return f"update {name}, or report the error to its authors"
