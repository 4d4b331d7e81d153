"""TensorBoard: points as event files, which `tensorboard --logdir FOLDER` draws by version. Needs no torch.

Numbers are scalars, notes are texts under `decision`. Several files of one folder, one per start of the trainer, are
one curve. The package `tensorboard` is imported when a monitor is made, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratchet.trainer.observability.monitors import Point


class TensorBoardMonitor:
    """Writes one event file in a folder."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, points: Sequence[Point]) -> None:
        """Add the points and flush the file."""
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._add(point, self._summary(value=values))
            if point.note is not None:
                self._add(point, self._text("decision", point.note))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, point: Point, summary: object) -> None:
        self._writer.add_event(self._event(wall_time=point.at, step=point.version, summary=summary))
