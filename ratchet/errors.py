"""The root of every error that Ratchet raises on purpose, and the errors of the command line and of the Python API.

    RatchetError
    ├── StoreError      store/errors.py
    ├── ProxyError      proxy/errors.py
    ├── TrainerError    trainer/errors.py: trainer and tuner
    ├── CliError        below: also raised in Python where a project is read, started or stopped
    ├── InvalidArgument below
    └── RunCancelled    below

Each message names the problem and the remedy.
"""

from __future__ import annotations


class RatchetError(Exception):
    """Root of the errors that Ratchet raises on purpose, in Python and on the command line."""


class CliError(RatchetError):
    """Root of the errors that the command line raises on purpose."""


class InvalidArgument(RatchetError):
    """An argument of a Python function, or an option of a command, is missing or contradicts another one."""


class RunCancelled(RatchetError):
    """A run of the tuner was cancelled. The message says how to resume it."""


class SettingsError(CliError):
    """A setting is unknown or has a wrong value."""


class VllmNotFound(CliError):
    """vLLM cannot be started."""


class BaseModelNotFound(CliError):
    """The base model is neither a model folder nor a hub name."""


class BaseModelConflict(CliError):
    """The project's versions belong to another base model."""


class GpuMemoryTooLow(CliError):
    """The GPU for vLLM has too little free memory. Names the processes that use it."""


class PortInUse(CliError):
    """A port that the user chose is in use."""


class DiskFull(CliError):
    """The disk of the state folder has too little free space."""


class AlreadyRunning(CliError):
    """Another `ratchet up` runs the project."""


class ServiceExited(CliError):
    """A required service exited. The message includes the end of its log."""


class ServiceStartTimeout(CliError):
    """A service did not become ready in time. The message includes the end of its log."""


class DemoFailed(CliError):
    """The demo's agent failed."""
