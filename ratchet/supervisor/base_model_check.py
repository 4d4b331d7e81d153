"""Check before anything starts that the versions of a project's agents belong to the base model that will be served.

Another base model is rejected with a message that names both and the remedies. A project without a recorded base model
records the one that it is started with, with a note. Files in the hub cache are read there; a model that is not yet
downloaded is checked once vLLM has it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ratchet.errors import CliError
from ratchet.settings.project_settings import Settings
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.records import BaseModel
from ratchet.store.store import Store
from ratchet.supervisor import vllm_command
from ratchet.trainer.adapters.base_model_files import bytes_to_read, digests, model_folder

_DIGEST_CHARS = 12  # characters of a digest
_LARGE = 2_000_000_000  # bytes; reading more is announced


def check_base_model(settings: Settings, store: Store, note: Callable[[str], None], *, serves: bool = False) -> bool:
    """Compare the base model with each agent's in the store; return whether its files could be read.

    `serves`: vLLM serves it already. Raises CliError.
    """
    model = vllm_command.check_model(settings.base_model)
    folder = model_folder(model)
    if folder is None:
        return False
    agents = [settings.for_agent(name) for name in settings.agents_by_name]
    files = _digests_of_all(agents, model, folder, note)
    for agent in agents:
        _check_agent(agent, store, model, files, note, serves=serves)
    return True


def _digests_of_all(
    agents: Sequence[Settings], model: str, folder: Path, note: Callable[[str], None]
) -> dict[str, str]:
    """Return the digests of the base model, which all agents share; each agent's trainer finds them cached."""
    caches = [agent.state.base_digests(agent.model) for agent in agents]
    cache = next((file for file in caches if file.is_file()), caches[0])
    if (size := bytes_to_read(folder, cache)) >= _LARGE:
        note(f"base model {model}: reading its {size / 1e9:.1f} GB of weights once, to compute their digests")
    files = digests(folder, cache)
    for other in caches:
        if other != cache and cache.is_file():
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cache, other)
    return files


def _check_agent(
    settings: Settings, store: Store, model: str, files: dict[str, str], note: Callable[[str], None], *, serves: bool
) -> None:
    """Compare the base model's digests with those of one agent's. Raises CliError."""
    known = store.base_models.base_model_of(settings.model)
    if known is not None and (parts := known.differing_parts(files)):
        if not store.base_models.clear_base_model(settings.model):
            raise CliError(mismatch_message(settings, store, known, model, files, parts))
        note(f"base model of {settings.model}: {model} replaces {known.name}, which nothing has run on yet")
        known = None
    unrecorded = known is None and _has_history(settings, store)
    store.base_models.register_base_model(settings.model, model, file_digests=files)
    if not serves:  # vLLM's options change its answers for the same files: the proxy records them again
        store.base_models.clear_base_model(settings.model, served_only=True)
    if unrecorded:
        weights = files["weights"][:_DIGEST_CHARS]
        note(f"base model: none was recorded for {settings.model}; it is now {model} (weights {weights})")


def mismatch_message(
    settings: Settings, store: Store, known: BaseModel, model: str, files: dict[str, str], parts: list[str]
) -> str:
    """Return the error message for a base model that the versions do not belong to."""
    alias, live = settings.model, store.policies.live().get(settings.model)
    newest = max((policy.version for policy in store.policies.all(alias)), default=0)
    versions = f"{alias}@0" if newest == 0 else f"{alias}@0 to {alias}@{newest}"
    serves = f", {alias}@{live.version} live," if live and newest else ""
    changed = ", ".join(
        f"{part} {known.file_digests[part][:_DIGEST_CHARS]}, now {files[part][:_DIGEST_CHARS]}" for part in parts
    )
    if settings.store is None:
        remedy = (
            "use another project for the new one (--project NAME), or start this one over: `ratchet down` and move "
            f"{settings.state.root} away"
        )
    else:
        remedy = "use another alias for the new one (--model NAME) or another --store"
    return (
        f"base_model: {versions}{serves} of project {settings.project} belong to {known.name}, and {model} is another "
        f"model ({changed}): adapters do not fit another base model, and scores cannot be compared. Go back to "
        f"{known.name}, {remedy}"
    )


def _has_history(settings: Settings, store: Store) -> bool:
    """Return whether the project has trained versions or trajectories."""
    later = any(policy.version for policy in store.policies.all(settings.model))
    return later or bool(store.trajectories.page(1, chosen=TrajectoryFilter(alias=settings.model)))
