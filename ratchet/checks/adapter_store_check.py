"""Whether versions can be written to the adapter store and read back, with this machine's credentials."""

from __future__ import annotations

from ratchet.checks.check_result import CheckResult
from ratchet.settings.project_settings import Settings


def check_adapter_store(settings: Settings) -> CheckResult:
    """Return the result of writing, reading and removing one small object."""
    from ratchet.trainer.adapters.adapter_store import AdapterStore
    from ratchet.trainer.errors import CheckpointError

    store = settings.adapters.store or ""
    try:
        AdapterStore(settings.state.adapter_cache).check(store)
    except CheckpointError as error:
        return CheckResult("adapters", False, str(error), "correct that, then run `ratchet doctor` again")
    return CheckResult("adapters", True, f"{store} can be written, read and listed")
