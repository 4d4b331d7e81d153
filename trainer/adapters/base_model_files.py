"""Identifies a base model: by the files that the trainer has, and by what a server answers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ratchet.store.policies import fingerprints
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer, ask_all
from ratchet.trainer.errors import ModelError

# Identify a base model by its files: SHA-256 of config, weights, tokenizer and chat template.
#
# Digests cover the content, so a changed copy of the same shape is another model. A file that has not changed (path,
# size, modification time, inode) is not read again; a file of the Hugging Face cache that is named by its SHA-256 is
# not read at all. READMEs, the version of the library that wrote the config, and the folder name do not count. Imports
# no torch.

log = logging.getLogger(__name__)

DIGESTS = "base_model.json"  # file of cached digests, next to an alias's checkpoints
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "tekken.json")
_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONCURRENCY = 4  # files
_CHUNK = 2**22


def model_folder(model: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of a model: a path, or a hub name in the Hugging Face cache; None if it does not exist."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    repository = cache / f"models--{model.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if (snapshot / "config.json").is_file() and _weights(snapshot) else None


def digests(folder: Path, cache: Path) -> dict[str, str]:
    """Return the digests of a model folder by part; `cache` is a file with the digests of unchanged files.

    Raises OSError if a file cannot be read.
    """
    known = _DigestCache(cache)
    parts = {
        "config": _digest_json(_json(folder / "config.json"), _IGNORED_CONFIG_KEYS),
        "weights": _joined(folder, _weights(folder), known),
        "tokenizer": _joined(folder, [folder / name for name in _TOKENIZER if (folder / name).is_file()], known),
        "chat_template": hashlib.sha256(_chat_template(folder).encode()).hexdigest(),
    }
    known.save()
    return parts


def bytes_to_read(folder: Path, cache: Path) -> int:
    """Return how many bytes of weights `digests` would read."""
    known = _DigestCache(cache)
    return sum(file.stat().st_size for file in _weights(folder) if known.of(file) is None)


def check_files(store: Store, alias: str, model: str, cache: Path) -> None:
    """Compare a base model's files with what the store knows; what is not known is taken up. Raises ModelError."""
    folder = model_folder(model)
    if folder is None or not (folder / "config.json").is_file():  # loading it raises the error
        return
    files = digests(folder, cache)
    known = store.base_models.base_model_of(alias)
    if known is not None and (parts := known.differing_parts(files)):
        raise ModelError(
            f"base_model {model} is not {known.name}, which the versions of {alias} belong to: its {', '.join(parts)} "
            "differ; name that one, or train the new one under an alias or in a project of its own"
        )
    if (known is None or not known.file_digests) and store.base_models.register_base_model(
        alias, model, file_digests=files
    ) is not None:
        log.info("event=base_model_registered alias=%s name=%s weights=%s", alias, model, files["weights"][:12])


class _DigestCache:
    """Cached digests by file, valid while the file's stat is unchanged."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._changed = False
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError):
            found = {}
        self._rows: dict[str, Any] = found if isinstance(found, dict) else {}

    def of(self, file: Path) -> str | None:
        """Return a file's digest, or None if the file has to be read."""
        there = file.resolve()
        if there.parent.name == "blobs" and _SHA256.fullmatch(there.name):
            return there.name
        row = self._rows.get(str(there))
        return str(row["sha256"]) if isinstance(row, dict) and row.get("stat") == _stat(there) else None

    def digest(self, file: Path) -> str:
        if (known := self.of(file)) is not None:
            return known
        there = file.resolve()
        before = _stat(there)
        digest = _read(there)
        self._rows[str(there)] = {"stat": before, "sha256": digest}
        self._changed = True
        return digest

    def save(self) -> None:
        if self._changed:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            aside.write_text(json.dumps(self._rows, indent=1))
            aside.replace(self._file)


def _stat(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _read(file: Path) -> str:
    sha = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


def _weights(folder: Path) -> list[Path]:
    """Return the weight files that a server loads: safetensors, or else PyTorch's."""
    for pattern in ("*.safetensors", "*.bin"):
        if found := [file for file in sorted(folder.glob(pattern)) if not file.name.startswith("adapter_")]:
            return found
    return []


def _joined(folder: Path, files: Iterable[Path], known: _DigestCache) -> str:
    """Return one digest of several files and their names; files are read in parallel."""
    listed = list(files)
    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        found = list(pool.map(known.digest, listed))
    lines = (f"{file.relative_to(folder)} {digest}\n" for file, digest in zip(listed, found, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _chat_template(folder: Path) -> str:
    for file in (folder / "chat_template.jinja", folder / "chat_template.json", folder / "tokenizer_config.json"):
        if file.is_file():
            template = file.read_text() if file.suffix == ".jinja" else _json(file).get("chat_template")
            if template:
                return template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return ""


def _digest_json(content: Mapping[str, Any], aside: Iterable[str]) -> str:
    kept = {key: value for key, value in content.items() if key not in aside}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


# Checks that vLLM still serves the base model of the alias's versions.
#
# It sends the fixed prompts of `store/policies/fingerprints.py` at the start, before each release and every few
# minutes. The proxy records the expected fingerprint; until then the check passes. While a replica's fingerprint
# differs, nothing is trained, scored against vLLM or released.

_EVERY = 300.0  # seconds between two checks
_AGAIN = 10.0  # seconds between two checks while a replica serves another base model


class ServedBaseModel:
    """Checks all replicas of one alias."""

    def __init__(self, store: Store, alias: str, replicas: Sequence[VllmServer]) -> None:
        self._store = store
        self._alias = alias
        self._replicas = replicas
        self._blocking_reason: str | None = None
        self._due_at = 0.0

    @property
    def known_reason(self) -> str | None:
        """Why nothing may be released, from the last check; None before the first one."""
        return self._blocking_reason

    def is_due(self, now: float) -> bool:
        """Whether `blocking_reason` would ask vLLM."""
        return now >= self._due_at

    def blocking_reason(self, now: float, *, fresh: bool = False) -> str | None:
        """Return why nothing may be released, from the last check; `fresh` checks again. Raises no EngineError."""
        if fresh or now >= self._due_at:
            reason = self._check()
            if reason is not None and reason != self._blocking_reason:
                log.error("event=other_base_model alias=%s reason=%r", self._alias, reason)
                self._store.alarms.raise_(f"base_model:{self._alias}", reason)
            if reason is None and self._blocking_reason is not None:
                log.info("event=base_model_is_back alias=%s", self._alias)
                self._store.alarms.clear(f"base_model:{self._alias}")
            self._blocking_reason = reason
            self._due_at = now + (_EVERY if reason is None else _AGAIN)
        return self._blocking_reason

    def _check(self) -> str | None:
        expected = self._store.base_models.base_model_of(self._alias)
        if expected is None or not expected.server_fingerprint:
            return None
        found, _ = ask_all(tuple(self._replicas), VllmServer.fingerprint, 1)  # the next caller reports the errors
        for url, fingerprint in found.items():
            difference = fingerprints.difference(expected.server_fingerprint, fingerprint)
            if difference is not None:
                return (
                    f"vLLM at {url} does not serve {expected.name}, the base model that the versions of "
                    f"{self._alias} belong to: {difference}; nothing is trained or published until it does"
                )
        return None
