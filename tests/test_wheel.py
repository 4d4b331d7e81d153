"""What the wheel and the source distribution hold, and that vLLM finds the plug-in of an installed wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.harness.packages import ROOT, build, build_wheel, copy_sources

COMPONENTS = ("store", "proxy", "trainer", "tuner")
# What `ratchet up` gives vLLM, and whether vLLM would find the plug-in there.
PROGRAM = """
import importlib.metadata, json, sys
from ratchet.supervisor.vllm_command import build_command, check_installed
from ratchet.settings.project_settings import Settings
settings = Settings.of({"base_model": sys.argv[1], "vllm": {"command": [sys.executable]}})
check_installed(settings)
path = build_command(settings, 8001, gpu=False).environment["PYTHONPATH"].split(":")[0]
sys.path.insert(0, path)
found = [point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")]
import ratchet_vllm_cpu
print(json.dumps({"path": path, "found": found, "register": callable(ratchet_vllm_cpu.register)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return folder


def _files(wheel: Path) -> set[str]:
    """Return a wheel's files without its metadata."""
    with zipfile.ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if not name.startswith("ratchet_rl-")}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    list_files = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run([*list_files, "ratchet", *COMPONENTS], cwd=ROOT, capture_output=True, text=True, check=True)
    names = {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}  # without links to folders
    assert _files(wheel) == {name if name.startswith("ratchet/") else f"ratchet/{name}" for name in names}
    assert {"ratchet/py.typed", "ratchet/proxy/coordinator/console/static/index.html"} <= _files(wheel)


@pytest.mark.slow
def test_a_source_distribution_follows_the_links_and_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build(copy_sources(tmp_path), "sdist", tmp_path)
    with tarfile.open(archive) as packed:
        assert not [member.name for member in packed if member.issym() or member.islnk()]
        packed.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    assert not (source / "tests").exists()
    assert _files(build(source, "wheel", tmp_path)) == _files(wheel)


@pytest.mark.slow
def test_a_git_url_installs_the_package(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*install, "--target", str(tmp_path), f"git+file://{ROOT}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for component in COMPONENTS:
        assert not (tmp_path / "ratchet" / component).is_symlink()
        assert (tmp_path / "ratchet" / component / "__init__.py").is_file()


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
        "import sys\ncheck_installed(Settings.of({'vllm': {'command': [sys.executable], 'devices': ''}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "broken")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CliError: Ratchet's plug-in for vLLM on CPUs" in done.stderr
    assert "Reinstall it from a clone of Ratchet: pip install ." in done.stderr
