"""The drawing library, loaded by who draws: pictures are files, no window is opened."""

from __future__ import annotations

from typing import Any

from ratchet.errors import CliError


def pyplot() -> Any:
    """Return matplotlib's pyplot for files. Raises CliError where it is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise CliError("a picture needs matplotlib: pip install 'ratchet-rl[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as loaded

    return loaded
