"""The metadata of distributions that are on the path and not installed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def register(folder: Path, distribution: str, lines: str) -> None:
    """Write the metadata of an installed distribution with these entry points into a folder of the path."""
    info = folder / f"{distribution}-2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(lines)
