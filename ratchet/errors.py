"""Every error that the face raises on purpose. Each message names the thing and the remedy.

FaceError
|-- SettingsError    ratchet.yaml, a RATCHET_* variable or an option holds what it must not
|-- EngineMissing    vLLM cannot be started from here
|-- ModelMissing     the base model is no model folder and no hub name
|-- OtherBaseModel   the project's versions belong to another base model
|-- GpuBusy          the GPU that vLLM would use has too little free memory
|-- PortBusy         a port that the user chose is taken
|-- DiskFull         the state folder has too little room
|-- AlreadyRunning   another `ratchet up` holds the project
|-- NotRunning       the command needs a running project
|-- RoomDied         a process ended that should run
|-- RoomSlow         a process did not become ready in time
|-- MeasurementFailed  `ratchet bench` could not measure
`-- DemoFailed       the demo could not run
"""

from __future__ import annotations


class FaceError(Exception):
    """Root of everything that the face raises on purpose."""


class SettingsError(FaceError):
    """A setting is unknown or out of its range."""


class EngineMissing(FaceError):
    """vLLM cannot be started from here."""


class ModelMissing(FaceError):
    """The base model is no model folder and no hub name."""


class OtherBaseModel(FaceError):
    """The project's versions belong to another base model than the one that is named."""


class GpuBusy(FaceError):
    """The GPU that vLLM would use has too little free memory; names who holds it."""


class PortBusy(FaceError):
    """A port that the user chose is taken."""


class DiskFull(FaceError):
    """The state folder has too little room."""


class AlreadyRunning(FaceError):
    """Another `ratchet up` holds the project."""


class NotRunning(FaceError):
    """The command needs a running project."""


class RoomDied(FaceError):
    """A process ended that should run; the message holds the end of its log."""


class RoomSlow(FaceError):
    """A process did not become ready in time; the message holds the end of its log."""


class MeasurementFailed(FaceError):
    """`ratchet bench` could not measure."""


class DemoFailed(FaceError):
    """The demo, or its agent, could not do its work."""
