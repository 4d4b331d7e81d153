"""`ratchet status --tensorboard`: what the store holds of training, as TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path

from ratchet import options
from ratchet.errors import CliError
from ratchet.settings import Settings


def write_tensorboard(settings: Settings, folder: Path) -> int:
    """Write every round and decision of the project's alias into a new folder; return how many points.

    Raises CliError where there is no store yet or the folder holds something, SettingError without tensorboard.
    """
    from ratchet.trainer.observability.monitors.monitor_thread import check_installed, open_monitor, replay

    check_installed(["tensorboard"])
    if settings.store is None and not settings.state.store.exists():
        raise CliError("nothing has run yet: there is no store to read")
    if folder.exists() and any(folder.iterdir()):
        raise CliError(f"{folder} is not empty, and two tellings of one training would be drawn: name a new folder")
    with options.open_store_for_command(settings.store_url) as store:
        monitor = open_monitor("tensorboard", folder, settings.model)
        try:
            count = replay(store, settings.model, monitor)
        finally:
            monitor.close()
    if not count:
        raise CliError(f"the store holds no round of {settings.model} and no decision about it: set `model`")
    return count
