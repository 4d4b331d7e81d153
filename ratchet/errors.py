"""The root of every error that Ratchet raises on purpose, and the errors of the command line and of the Python API.

The components' own are in `store/errors.py`, `proxy/errors.py` and `trainer/errors.py`. Each message names the problem
and the remedy.
"""

from __future__ import annotations


class RatchetError(Exception):
    """Root of the errors that Ratchet raises on purpose, in Python and on the command line."""


class CliError(RatchetError):
    """Root of the errors of the command line; also raised in Python where a project is read, started or stopped."""


class InvalidArgument(RatchetError):
    """An argument of a Python function, or an option of a command, is missing or contradicts another one."""


class RunCancelled(RatchetError):
    """A run of the tuner was cancelled. The message says how to resume it."""


class SettingsError(CliError):
    """A setting is unknown or has a wrong value."""
