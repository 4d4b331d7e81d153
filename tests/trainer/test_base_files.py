"""A base model is known by the content of its files, which are read once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ratchet.trainer.adapters.base_model_files import bytes_to_read, digests, model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    (folder / "model-1.safetensors").write_bytes(os.urandom(5000))
    (folder / "model-2.safetensors").write_bytes(os.urandom(5000))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {part for part in before if before[part] != after[part]}


def test_a_perturbed_copy_of_the_same_shape_is_another_model(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    copy = shutil.copytree(model, tmp_path / "copy")
    assert digests(copy, cache) == digests(model, cache)
    content = bytearray((copy / "model-2.safetensors").read_bytes())
    content[2500] ^= 1  # one bit of one weight
    (copy / "model-2.safetensors").write_bytes(content)
    assert changed(digests(model, cache), digests(copy, cache)) == {"weights"}


def test_each_part_has_its_own_fingerprint_and_irrelevant_files_are_ignored(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    first = digests(model, cache)
    (model / "README.md").write_text("A model.")
    (model / "config.json").write_text(
        json.dumps({"hidden_size": 8, "model_type": "qwen3", "transformers_version": "5", "_name_or_path": "x"})
    )
    assert digests(model, cache) == first
    (model / "tokenizer.json").write_text('{"version": 2}')
    assert changed(first, digests(model, cache)) == {"tokenizer"}
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m }}{% endfor %}")
    assert changed(first, digests(model, cache)) == {"tokenizer", "chat_template"}
    (model / "config.json").write_text('{"hidden_size": 16}')
    assert changed(first, digests(model, cache)) == {"tokenizer", "chat_template", "config"}


def test_a_file_that_has_not_changed_is_not_read_again(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "folder" / "digests.json"
    assert bytes_to_read(model, cache) == 10_000
    first = digests(model, cache)
    assert bytes_to_read(model, cache) == 0
    file = model / "model-1.safetensors"
    before = file.stat()
    file.write_bytes(bytes(5000))  # with its old modification time: the change is not detected
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests(model, cache) == first
    os.utime(file)
    assert bytes_to_read(model, cache) == 5000
    assert changed(first, digests(model, cache)) == {"weights"}


def test_blobs_of_the_hugging_face_cache_are_not_read(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    assert model_folder("owner/name", environ) is None  # nothing is downloaded yet
    for file in model.iterdir():
        content = file.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file.name).symlink_to(blob)
    assert model_folder("owner/name", environ) == snapshot
    assert bytes_to_read(snapshot, tmp_path / "digests.json") == 0
    assert digests(snapshot, tmp_path / "digests.json") == digests(model, tmp_path / "other.json")
    assert model_folder(str(model), environ) == model
