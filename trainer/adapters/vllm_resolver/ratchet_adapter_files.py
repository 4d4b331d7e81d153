"""Download a published adapter from object storage into a local cache, verified by its manifest.

A published adapter is a folder of objects with a `manifest.json`, which is written last and holds the size and the
SHA-256 of every file. Promises that the returned folder is complete and verified, and that several processes can share
a cache. The cache is bounded: the least recently used folders are removed, except those used in the last ten minutes.
Needs fsspec, and nothing of Ratchet: the plug-in for vLLM runs where Ratchet is not installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "learner"  # the part of a checkpoint that only training needs
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_LOCK = ".lock"
_IN_USE_SECONDS = 600.0
_ABANDONED_SECONDS = 3600.0
# Without these, the client for S3 waits minutes for a server that is away, and answers from a copy of old listings.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}},
    },
    "gs": {"use_listings_cache": False},
}


class DamagedAdapter(Exception):
    """A published adapter has no valid manifest, or a file whose size or SHA-256 is not the manifest's."""


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it. Raises ImportError if its package is not installed."""
    import fsspec

    found = fsspec.core.url_to_fs(url, **_OPTIONS.get(url.partition("://")[0], {}))
    return found[0], str(found[1])


def parse_manifest(content: bytes, url: str) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of every file of a manifest. Raises DamagedAdapter."""
    try:
        manifest = json.loads(content)
        sizes, digests = manifest["bytes"], manifest["sha256"]
        files = {str(name): (int(sizes[name]), str(digests[name])) for name in sizes}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedAdapter(f"{url}/{MANIFEST} is not a manifest with sizes and checksums ({error!r})") from error
    if not files or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise DamagedAdapter(f"{url}/{MANIFEST} names no file, or one outside its folder")
    return files


def format_manifest(files: Mapping[str, tuple[int, str]]) -> str:
    sizes = {name: size for name, (size, _) in files.items()}
    digests = {name: digest for name, (_, digest) in files.items()}
    return json.dumps({"bytes": sizes, "sha256": digests}, indent=2) + "\n"


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fetch(url: str, cache: Path, *, state: bool, max_cache_bytes: int) -> Path:
    """Return a local folder with the files of a published adapter; with `state` also what only training needs. A URL
    that ends with a factor names an amplified copy, which is made here.

    Raises FileNotFoundError if there is no such adapter, DamagedAdapter, OSError, and the errors of the file system's
    own library.
    """
    url, factor = split_factor(url.rstrip("/"))
    if factor is not None:
        return _fetch_amplified(url, factor, cache, max_cache_bytes)
    files_of_store, path = open_url(url)
    published = parse_manifest(files_of_store.cat_file(f"{path}/{MANIFEST}"), url)
    files = {name: entry for name, entry in published.items() if state or Path(name).parts[0] != STATE}
    # The name follows from the content: a store that was emptied and filled again never meets an old copy.
    key = hashlib.sha256(f"{url}\n{format_manifest(files)}".encode()).hexdigest()[:32]
    folder = cache / key
    if not _is_complete(folder, files):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _download(files_of_store, path, url, files, folder)
    os.utime(folder / MANIFEST)
    _evict(cache, keep=folder, max_cache_bytes=max_cache_bytes)
    return folder


def _fetch_amplified(url: str, factor: float, cache: Path, max_cache_bytes: int) -> Path:
    plain = fetch(url, cache, state=False, max_cache_bytes=max_cache_bytes)
    folder = plain.with_name(f"{plain.name}x{factor:g}")
    if not (folder / MANIFEST).is_file():
        aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        aside.mkdir()
        try:
            amplify(plain, aside, factor)
            files = {name: ((aside / name).stat().st_size, digest_of(aside / name)) for name in (CONFIG, WEIGHTS)}
            (aside / MANIFEST).write_text(format_manifest(files))
            with _locked(cache):
                if not folder.exists():
                    aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def amplify(folder: Path, target: Path, factor: float) -> None:
    """Write an amplified copy of an adapter into the empty folder `target`: the same weights file, as a hard link where
    the file system has them, with `lora_alpha` times `factor`.

    Raises DamagedAdapter if the weights are not those of the manifest, and OSError.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        config["lora_alpha"] = config["lora_alpha"] * factor
        published = parse_manifest((folder / MANIFEST).read_bytes(), str(folder))
        _, digest = published[WEIGHTS]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedAdapter(f"{folder} has no adapter with lora_alpha and a checksum ({error!r})") from error
    try:
        os.link(folder / WEIGHTS, target / WEIGHTS)
    except OSError:
        shutil.copyfile(folder / WEIGHTS, target / WEIGHTS)
    if (found := digest_of(target / WEIGHTS)) != digest:
        raise DamagedAdapter(f"{folder / WEIGHTS} has the SHA-256 {found}; its manifest says {digest}")
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def split_factor(name: str) -> tuple[str, float | None]:
    """Return the name of a version, and the factor of the amplified copy that `mail@12x32` or `.../0012x32` names."""
    match = re.fullmatch(r"(.*\d)x(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", name)
    return (match[1], float(match[2])) if match else (name, None)


def _download(files_of_store: Any, path: str, url: str, files: Mapping[str, tuple[int, str]], folder: Path) -> None:
    """Download and verify the files, then rename; another process may have done the same first."""
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        for name, (size, digest) in files.items():
            target = aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            files_of_store.get_file(f"{path}/{name}", str(target))
            found = digest_of(target)
            if target.stat().st_size != size or found != digest:
                raise DamagedAdapter(
                    f"{url}/{name} has {target.stat().st_size} bytes and the SHA-256 {found}; its manifest says "
                    f"{size} bytes and {digest}"
                )
        (aside / MANIFEST).write_text(format_manifest(files))
        with _locked(folder.parent):
            if _is_complete(folder, files):
                return
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_complete(folder: Path, files: Mapping[str, tuple[int, str]]) -> bool:
    try:
        return (folder / MANIFEST).is_file() and all(
            (folder / name).stat().st_size == size for name, (size, _) in files.items()
        )
    except OSError:
        return False


def _evict(cache: Path, *, keep: Path, max_cache_bytes: int) -> None:
    """Remove the least recently used folders above `max_cache_bytes`, and what killed processes left."""
    now = time.time()
    with _locked(cache):
        entries: list[tuple[float, int, Path]] = []
        for folder in cache.iterdir():
            if not folder.is_dir():
                continue
            with contextlib.suppress(OSError):
                marker = folder if folder.name.startswith(".") else folder / MANIFEST
                if folder.name.startswith("."):
                    if now - marker.stat().st_mtime > _ABANDONED_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)
                    continue
                size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                entries.append((marker.stat().st_mtime, size, folder))
        total = sum(size for _, size, _ in entries)
        for used_at, size, folder in sorted(entries):
            if total <= max_cache_bytes or now - used_at < _IN_USE_SECONDS:
                break
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)
                total -= size


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    with (cache / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
