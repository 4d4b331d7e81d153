"""What an installed wheel holds: built as pip builds it, unpacked as pip installs it, and asked from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "store", "proxy", "trainer", "tuner", "ratchet")
# What `ratchet up` gives vLLM, and whether vLLM would find the plug-in there.
PROGRAM = """
import importlib.metadata, json, sys
from ratchet.supervisor.vllm_command import build_command, check_installed
from ratchet.settings.project_settings import Settings
settings = Settings.model_validate({"base_model": sys.argv[1], "vllm": {"command": [sys.executable]}})
check_installed(settings)
path = build_command(settings, 8001, gpu=False).environment["PYTHONPATH"].split(":")[0]
sys.path.insert(0, path)
found = [point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
import ratchet_vllm_cpu
print(json.dumps({"path": path, "found": found, "register": callable(ratchet_vllm_cpu.register)}))
"""


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this tree in an empty folder and return it."""
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(build_wheel(folder)) as packed:
        packed.extractall(folder / "installed")
    return folder / "installed"


def test_an_installed_wheel_gives_vllm_on_cpus_a_plugin_that_is_there(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    output = json.loads(done.stdout)
    assert Path(output["path"]).is_relative_to(installed)
    assert (Path(output["path"]) / "ratchet_vllm_cpu.py").is_file()
    assert "ratchet_vllm_cpu:register" in output["found"]
    assert output["register"]


def test_without_its_plugin_vllm_on_cpus_is_not_started(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(installed, tmp_path / "broken", ignore=shutil.ignore_patterns("ratchet_vllm_cpu*.dist-info"))
    program = (
        "from ratchet.supervisor.vllm_command import check_installed\n"
        "from ratchet.settings.project_settings import Settings\n"
        "import sys\ncheck_installed(Settings.model_validate({'vllm': {'command': [sys.executable], 'devices': ''}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "broken")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "VllmNotFound: Ratchet's plug-in for vLLM on CPUs" in done.stderr
    assert "Reinstall it from a clone of Ratchet: pip install ." in done.stderr
