"""The virtual environment of bfcl-eval: found or created. Only creating it needs a package index."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ratchet.trainer.errors import TrainerError

PACKAGE = "bfcl-eval"
VERSION = "2026.3.23"
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


class EvaluationUnready(TrainerError):
    """The evaluation cannot be run; the message names the remedy."""


def find(folder: Path) -> Path:
    """Return the environment's Python. Raises EvaluationUnready if it is incomplete."""
    python = folder / "bin" / "python"
    if not _stamp(folder).is_file() or not python.exists():
        raise EvaluationUnready(
            f"{PACKAGE} {VERSION} is not set up in {folder}: run `ratchet eval bfcl --setup` once (about 400 MB), or "
            "name its folder with --environment"
        )
    return python


def set_up(folder: Path) -> Path:
    """Create the environment with pip and its settings; return its Python. Raises EvaluationUnready.

    An existing environment is replaced; any other non-empty folder is refused.
    """
    if folder.exists() and not (folder / "pyvenv.cfg").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise EvaluationUnready(
            f"{folder} is not empty and not a virtual environment: name another folder with --environment"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], "creating the environment")
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, "--requirement", str(_REQUIREMENTS)], "installing dependencies")
    _run([*install, "--no-deps", f"{PACKAGE}=={VERSION}"], f"installing {PACKAGE}")
    _stamp(folder).touch()
    return python


def _stamp(folder: Path) -> Path:
    return folder / f".{PACKAGE}-{VERSION}"


def _run(command: list[str], what: str) -> None:
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise EvaluationUnready(f"{what} failed: {' '.join(command)}; see its output above")
