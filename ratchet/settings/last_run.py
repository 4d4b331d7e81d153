"""What a project runs with, or ran with last: so that `doctor` and `status` need not be told again what `up` was told.

Read from the resolved settings in the state folder, which hold no secret. Options of the command itself win.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import yaml

from ratchet.errors import SettingsError
from ratchet.settings import Settings
from ratchet.settings.masking import HIDDEN, mask_store_url

_TAKEN = ("model", "base_model", "store")


def adopt(settings: Settings, given: Collection[str] = ()) -> Settings:
    """Return the settings with model, base model and store of the project's run; `given` names what stays.

    The judge is taken as well, where the settings name none.

    Raises SettingsError where the run's store has a password, which is not kept, and `settings` name another store.
    """
    ran = read(settings)
    found = {key: value for key, value in ran.items() if key in _TAKEN and key not in given}
    if not settings.has_judge and (judge := (ran.get("trainer") or {}).get("judge")):
        found["trainer"] = {**settings.trainer, "judge": judge}
    store = found.get("store")
    if isinstance(store, str) and HIDDEN in store:
        if settings.store is None or mask_store_url(settings.store) != store:
            raise SettingsError(
                f"store: project {settings.project} runs, or ran last, on {store}, whose password is never written "
                "down: set RATCHET_STORE or give --store"
            )
        del found["store"]
    return settings.model_copy(update=found)


def read(settings: Settings) -> dict[str, Any]:
    """Return the settings that the project's rooms were started with, as they were written; empty before that."""
    try:
        content = yaml.safe_load(settings.state.resolved.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
