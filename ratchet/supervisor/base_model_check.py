"""Whether a project's versions belong to the base model that is about to be served: asked before anything starts.

Promises: a base model that is not the one of the versions is refused, and the message names both and the remedies; a
project of before, whose base model was not written down, takes up the one that it is started with, and says so. What
is in a hub's cache is looked at there; what is yet to be downloaded is looked at once vLLM has it.
"""

from __future__ import annotations

from collections.abc import Callable

from ratchet.errors import OtherBaseModel
from ratchet.settings import Settings
from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.policies.base_models import BaseModel
from ratchet.store.store import Store
from ratchet.supervisor import vllm_command
from ratchet.trainer.adapters.base_model_files import bytes_to_read, digests, model_folder

_SHOWN = 12  # characters of a digest
_SLOW = 2_000_000_000  # bytes from which on reading is announced


def check(settings: Settings, store: Store, note: Callable[[str], None], *, serves: bool = False) -> bool:
    """Compare the base model with what the store knows; return whether its files could be looked at.

    `serves`: vLLM serves it already. Raises OtherBaseModel.
    """
    model = vllm_command.check_model(settings.base_model)
    folder = model_folder(model)
    if folder is None:
        return False
    cache = settings.state.base_digests(settings.model)
    if (size := bytes_to_read(folder, cache)) >= _SLOW:
        note(f"base model {model}: reading its {size / 1e9:.1f} GB of weights once, to know them again")
    files = digests(folder, cache)
    known = store.base_models.of(settings.model)
    if known is not None and (parts := known.differing_parts(files)):
        if not store.base_models.forget(settings.model):
            raise OtherBaseModel(refusal(settings, store, known, model, files, parts))
        note(f"base model: {model} takes the place of {known.name}, on which nothing has run yet")
        known = None
    rests = known is None and _rests(settings, store)
    store.base_models.register_base_model(settings.model, model, file_digests=files)
    if not serves:  # how vLLM answers with the same files may change with its options: the proxy takes it up anew
        store.base_models.forget(settings.model, served_only=True)
    if rests:
        weights = files["weights"][:_SHOWN]
        note(f"base model: it was not known yet which one this project rests on; it is {model} (weights {weights})")
    return True


def refusal(
    settings: Settings, store: Store, known: BaseModel, model: str, files: dict[str, str], parts: list[str]
) -> str:
    """Return what to say of a base model that is not the one of the versions."""
    alias, live = settings.model, store.policies.live().get(settings.model)
    newest = max((policy.version for policy in store.policies.all(alias)), default=0)
    versions = f"{alias}@0" if newest == 0 else f"{alias}@0 to {alias}@{newest}"
    serves = f", {alias}@{live.version} live," if live and newest else ""
    shown = ", ".join(f"{part} {known.file_digests[part][:_SHOWN]}, now {files[part][:_SHOWN]}" for part in parts)
    if settings.store is None:
        remedy = (
            "give the new one a project of its own (--project NAME), or start this one anew: `ratchet down` and move "
            f"{settings.state.root} away"
        )
    else:
        remedy = "give the new one an alias of its own (--model ALIAS) or another --store"
    return (
        f"base_model: {versions}{serves} of project {settings.project} belong to {known.name}, and {model} is another "
        f"model ({shown}): an adapter of one spoils the other, and their scores cannot be compared. Go back to "
        f"{known.name}, {remedy}"
    )


def _rests(settings: Settings, store: Store) -> bool:
    """Return whether versions or trajectories of before rest on a base model that nobody wrote down."""
    later = any(policy.version for policy in store.policies.all(settings.model))
    return later or bool(store.trajectories.page(1, chosen=TrajectoryFilter(alias=settings.model)))
