"""TensorBoard: points as event files, which `tensorboard --logdir FOLDER` draws by version. Needs no torch.

Numbers are scalars, notes are texts under `decision`. Several files of one folder, one per start of the trainer, are
one curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ratchet.trainer.observability.monitors import Point


class TensorBoardMonitor:
    """Writes one event file in a folder."""

    def __init__(self, folder: Path, alias: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, points: Sequence[Point]) -> None:
        """Add the points and flush the file."""
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._add(point, Summary(value=values))
            if point.note is not None:
                self._add(point, text_pb("decision", point.note))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, point: Point, summary: object) -> None:
        self._writer.add_event(Event(wall_time=point.at, step=point.version, summary=summary))
