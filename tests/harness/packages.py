"""Packages of this tree: built as pip builds them, and installed in a fresh environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import uv

ROOT = Path(__file__).parents[2]
_SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "store", "proxy", "trainer", "tuner", "ratchet")


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this tree in an empty folder and return it."""
    return build(copy_sources(folder), "wheel", folder)


def copy_sources(folder: Path) -> Path:
    """Copy what the build reads to `folder`/source, with its symlinks, and return that."""
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    return source


def build(source: Path, kind: str, folder: Path) -> Path:
    """Build the "wheel" or "sdist" of a source tree in a folder and return its file."""
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / done.stdout.splitlines()[-1]


def environment_without_plugins(folder: Path) -> dict[str, str]:
    """Return an environment in which `python -S` finds this tree and its dependencies, but no plug-in of it."""
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("ratchet_rl_", "__editable__")):
            (folder / path.name).symlink_to(path)
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel in a new virtual environment and return its folder of commands.

    The dependencies come from the environment of the tests, on the path after the new environment's own packages.
    """
    venv.create(folder, symlinks=True)
    command = [
        uv.find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-deps",
        "--python",
        str(folder),
        str(wheel),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def register(folder: Path, distribution: str, lines: str) -> None:
    """Write the metadata of an installed distribution with these entry points into a folder of the path."""
    info = folder / f"{distribution}-2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(lines)
