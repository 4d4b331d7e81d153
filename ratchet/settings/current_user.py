"""The user of this process, for records of decisions."""

from __future__ import annotations

import getpass


def current_user() -> str:
    """Return the user's name."""
    try:
        return getpass.getuser()
    except OSError:  # a container may run under a number without a name
        return "a person"
