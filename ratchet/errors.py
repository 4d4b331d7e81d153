"""Every error that the face raises on purpose. Each message names the thing and the remedy.

CliError
|-- SettingsError    ratchet.yaml, a RATCHET_* variable or an option holds what it must not
|-- VllmNotFound    vLLM cannot be started from here
|-- BaseModelNotFound     the base model is no model folder and no hub name
|-- OtherBaseModel   the project's versions belong to another base model
|-- GpuMemoryTooLow          the GPU that vLLM would use has too little free memory
|-- PortInUse         a port that the user chose is taken
|-- DiskFull         the state folder has too little room
|-- AlreadyRunning   another `ratchet up` holds the project
|-- NotRunning       the command needs a running project
|-- ServiceExited         a process ended that should run
|-- ServiceStartTimeout         a process did not become ready in time
|-- BenchmarkFailed  `ratchet bench` could not measure
`-- DemoFailed       the demo could not run
"""

from __future__ import annotations


class CliError(Exception):
    """Root of everything that the face raises on purpose."""


class SettingsError(CliError):
    """A setting is unknown or out of its range."""


class VllmNotFound(CliError):
    """vLLM cannot be started from here."""


class BaseModelNotFound(CliError):
    """The base model is no model folder and no hub name."""


class OtherBaseModel(CliError):
    """The project's versions belong to another base model than the one that is named."""


class GpuMemoryTooLow(CliError):
    """The GPU that vLLM would use has too little free memory; names who holds it."""


class PortInUse(CliError):
    """A port that the user chose is taken."""


class DiskFull(CliError):
    """The state folder has too little room."""


class AlreadyRunning(CliError):
    """Another `ratchet up` holds the project."""


class NotRunning(CliError):
    """The command needs a running project."""


class ServiceExited(CliError):
    """A process ended that should run; the message holds the end of its log."""


class ServiceStartTimeout(CliError):
    """A process did not become ready in time; the message holds the end of its log."""


class BenchmarkFailed(CliError):
    """`ratchet bench` could not measure."""


class DemoFailed(CliError):
    """The demo, or its agent, could not do its work."""
