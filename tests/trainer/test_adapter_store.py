"""Versions are published whole or not at all, verified when they are fetched, and every failure names the remedy."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import s3fs

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.adapter_store import AdapterStore, amplified, weights_checksum
from ratchet.trainer.adapters.vllm_resolver import ratchet_adapter_files as adapter_files
from ratchet.trainer.errors import (
    AdapterStoreUnreachable,
    CheckpointDamaged,
    CheckpointError,
    TrainerError,
)
from tests.harness.ports import free_port
from tests.harness.s3 import BUCKET, S3Server, erring_server

pytestmark = pytest.mark.slow  # the S3 server takes seconds to start
ROOT = f"s3://{BUCKET}/team/mail/checkpoints"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    running = S3Server(tmp_path_factory.mktemp("s3"))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    forget_connections()
    yield
    for name in server.names():
        server.remove(name)
    forget_connections()


@pytest.fixture
def adapters(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "cache", sleep=lambda seconds: None)


def forget_connections() -> None:
    s3fs.S3FileSystem.clear_instance_cache()


def saved(folder: Path, content: bytes = b"adapter") -> Path:
    """Write a checkpoint as the learner does."""

    def write(aside: Path) -> None:
        (aside / checkpoint.STATE).mkdir()
        (aside / checkpoint.STATE / "optimizer.pt").write_bytes(b"state" * 100)
        (aside / "adapter_model.safetensors").write_bytes(content)
        (aside / "adapter_config.json").write_text("{}")

    checkpoint.write_atomically(folder, write)
    return folder


def test_what_is_published_is_fetched_by_another_machine(
    adapters: AdapterStore, server: S3Server, tmp_path: Path
) -> None:
    adapters.check(ROOT)
    reference = adapters.next_reference(ROOT, at_least=4)
    assert reference == f"{ROOT}/0004"
    assert not adapters.complete(reference)
    adapters.publish(saved(tmp_path / "0004"), reference)
    adapters.publish(tmp_path / "0004", reference)  # the answer was lost: the same again is no error
    assert adapters.complete(reference)
    assert adapters.next_reference(ROOT) == f"{ROOT}/0005"
    elsewhere = AdapterStore(tmp_path / "elsewhere")
    folder = elsewhere.fetch(reference)
    assert checkpoint.complete(folder)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"adapter"
    assert (folder / checkpoint.STATE / "optimizer.pt").exists()
    assert not (elsewhere.fetch(reference, state=False) / checkpoint.STATE).exists()
    assert [name for name in server.names() if "manifest" in name] == ["team/mail/checkpoints/0004/manifest.json"]


def test_a_published_version_is_never_overwritten(adapters: AdapterStore, tmp_path: Path) -> None:
    adapters.publish(saved(tmp_path / "a"), f"{ROOT}/0001")
    with pytest.raises(CheckpointError, match="save under a new number"):
        adapters.publish(saved(tmp_path / "b", b"another"), f"{ROOT}/0001")


def test_a_version_without_its_manifest_is_not_there(adapters: AdapterStore, server: S3Server, tmp_path: Path) -> None:
    adapters.publish(saved(tmp_path / "a"), f"{ROOT}/0001")
    server.remove("team/mail/checkpoints/0001/manifest.json")  # as after a kill before the last write
    assert not adapters.complete(f"{ROOT}/0001")
    with pytest.raises(CheckpointDamaged, match="no published version"):
        adapters.fetch(f"{ROOT}/0001")
    assert adapters.next_reference(ROOT) == f"{ROOT}/0002"  # the number is not used again
    assert adapters.remove_incomplete(ROOT) == ()  # it may be on its way


def test_a_version_is_verified_in_the_store_and_not_in_the_cache(
    adapters: AdapterStore, server: S3Server, tmp_path: Path
) -> None:
    reference = f"{ROOT}/0001"
    adapters.publish(saved(tmp_path / "a"), reference)
    adapters.fetch(reference, state=False)
    adapters.verify(reference)
    server.put("team/mail/checkpoints/0001/adapter_model.safetensors", b"adaptes")
    with pytest.raises(CheckpointDamaged, match=r"adapter_model\.safetensors has 7 bytes and the SHA-256"):
        adapters.verify(reference)


@pytest.mark.parametrize("content", [b"adaptes", b"a"])
def test_a_file_that_is_not_the_manifests_is_refused(
    adapters: AdapterStore, server: S3Server, tmp_path: Path, content: bytes
) -> None:
    adapters.publish(saved(tmp_path / "a"), f"{ROOT}/0001")
    server.put("team/mail/checkpoints/0001/adapter_model.safetensors", content)
    with pytest.raises(CheckpointDamaged, match=r"adapter_model\.safetensors has \d bytes and the SHA-256"):
        adapters.fetch(f"{ROOT}/0001")
    assert not any(entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir())


def test_a_manifest_that_is_damaged_or_leaves_its_folder_is_refused(
    adapters: AdapterStore, server: S3Server, tmp_path: Path
) -> None:
    outside = {"bytes": {"../../x": 1}, "sha256": {"../../x": "0"}}
    for content in (b"{", b"[]", json.dumps({"bytes": {"a": 1}}).encode(), json.dumps(outside).encode()):
        server.put("team/mail/checkpoints/0001/manifest.json", content)
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
            adapters.fetch(f"{ROOT}/0001")
        assert not adapters.complete(f"{ROOT}/0001")


def test_a_checkpoint_that_changed_on_disk_is_not_published(
    adapters: AdapterStore, server: S3Server, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "a")
    (folder / "adapter_model.safetensors").write_bytes(b"adapteR")
    with pytest.raises(CheckpointDamaged, match="nothing was uploaded"):
        adapters.publish(folder, f"{ROOT}/0001")
    assert server.names() == []


def test_old_versions_and_states_are_removed_and_the_rest_stays_complete(
    adapters: AdapterStore, server: S3Server, tmp_path: Path
) -> None:
    for number in (1, 2, 3, 4):
        adapters.publish(saved(tmp_path / str(number)), f"{ROOT}/{number:04d}")
    assert adapters.prune(ROOT, {2, 3}, {3}) == (1,)
    assert all(adapters.complete(f"{ROOT}/{number:04d}") for number in (2, 3, 4))
    assert not any("0002/learner" in name for name in server.names())
    assert any("0003/learner" in name for name in server.names())
    assert adapters.prune(ROOT, {2, 3}, {3}) == ()
    assert checkpoint.complete(adapters.fetch(f"{ROOT}/0002"))


def test_concurrent_readers_share_one_verified_copy(adapters: AdapterStore, tmp_path: Path) -> None:
    adapters.publish(saved(tmp_path / "a", b"x" * 300_000), f"{ROOT}/0001")
    with ThreadPoolExecutor(6) as readers:
        folders = set(readers.map(lambda _: adapters.fetch(f"{ROOT}/0001"), range(12)))
    (folder,) = folders
    assert checkpoint.complete(folder)
    assert [entry for entry in folder.parent.iterdir() if entry.is_dir()] == [folder]


def test_the_cache_is_bounded_and_keeps_what_was_used_lately(tmp_path: Path) -> None:
    adapters = AdapterStore(tmp_path / "cache", max_cache_bytes=3000)
    folders = []
    for number in (1, 2, 3):
        adapters.publish(saved(tmp_path / str(number), bytes([number]) * 1000), f"{ROOT}/{number:04d}")
        folders.append(adapters.fetch(f"{ROOT}/{number:04d}", state=False))
    assert all(folder.exists() for folder in folders)  # each was used just now
    hour_ago = time.time() - 3600
    for age, folder in enumerate(folders):
        os.utime(folder / checkpoint.MANIFEST, (hour_ago + age, hour_ago + age))
    adapters.fetch(f"{ROOT}/0003", state=False)
    assert [folder.exists() for folder in folders] == [False, True, True]
    (folders[1] / "adapter_model.safetensors").write_bytes(b"cut")  # damaged on disk: fetched again
    assert checkpoint.complete(adapters.fetch(f"{ROOT}/0002", state=False))


def test_another_version_under_an_old_name_is_not_served_from_the_cache(
    adapters: AdapterStore, server: S3Server, tmp_path: Path
) -> None:
    adapters.publish(saved(tmp_path / "a"), f"{ROOT}/0001")
    adapters.fetch(f"{ROOT}/0001")
    for name in server.names():  # the bucket was emptied, and the project began again
        server.remove(name)
    adapters.publish(saved(tmp_path / "b", b"another"), f"{ROOT}/0001")
    assert (adapters.fetch(f"{ROOT}/0001") / "adapter_model.safetensors").read_bytes() == b"another"


def refused(adapters: AdapterStore, root: str, expected: type[TrainerError], words: str) -> None:
    with pytest.raises(expected, match=words):
        adapters.check(root)


def test_a_store_that_cannot_be_used_says_why(
    adapters: AdapterStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused(adapters, "s3://nobody/x", CheckpointError, "it does not exist: create the bucket")
    refused(adapters, "gs://bucket/x", CheckpointError, r"gs:// is not installed: .*'\.\[gs\]'")
    refused(adapters, "xx://bucket/x", CheckpointError, "use a folder, s3:// or gs://")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    forget_connections()
    refused(adapters, ROOT, CheckpointError, "set AWS_ACCESS_KEY_ID")


def test_a_store_that_is_away_may_come_back(
    adapters: AdapterStore, monkeypatch: pytest.MonkeyPatch, server: S3Server, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    forget_connections()
    with pytest.raises(AdapterStoreUnreachable, match="AWS_ENDPOINT_URL"):
        adapters.publish(folder, f"{ROOT}/0001")
    assert checkpoint.complete(folder)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    forget_connections()
    adapters.publish(folder, f"{ROOT}/0001")
    assert adapters.complete(f"{ROOT}/0001")


@pytest.mark.parametrize(
    ("status", "code", "expected", "words"),
    [
        (403, "AccessDenied", CheckpointError, "access denied: "),
        (507, "XMinioStorageFull", CheckpointError, "is full: free space"),
    ],
)
def test_a_read_only_and_a_full_store_leave_the_local_version_whole(
    adapters: AdapterStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, code: str,
    expected: type[TrainerError], words: str,
) -> None:  # fmt: skip
    folder = saved(tmp_path / "a")
    with erring_server(status, code) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        forget_connections()
        with pytest.raises(expected, match=words):
            adapters.publish(folder, f"{ROOT}/0001")
    assert checkpoint.complete(folder)


def test_a_reader_during_a_publication_sees_nothing_or_all(adapters: AdapterStore, tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", b"x" * 2_000_000)
    seen: list[bool] = []
    done = threading.Event()

    def read() -> None:
        reader = AdapterStore(tmp_path / "reader")
        while not done.is_set():
            whole = reader.complete(f"{ROOT}/0001")
            if whole:
                assert checkpoint.complete(reader.fetch(f"{ROOT}/0001"))
            seen.append(whole)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        while not seen:
            time.sleep(0.01)
        adapters.publish(folder, f"{ROOT}/0001")
        count = len(seen)
        while len(seen) < count + 2 and not reading.done():
            time.sleep(0.01)
        done.set()
        reading.result()
    assert seen[0] is False
    assert seen[-1] is True


def test_a_local_store_keeps_its_folders_in_place(tmp_path: Path) -> None:
    adapters = AdapterStore(tmp_path / "cache")
    root = str(tmp_path / "models" / "mail" / "checkpoints")
    reference = adapters.next_reference(root)
    assert reference == str(tmp_path / "models" / "mail" / "checkpoints" / "0001")
    adapters.publish(saved(tmp_path / "other"), reference)
    assert adapters.fetch(reference) == Path(reference)
    assert adapters.complete(reference)
    assert not (tmp_path / "cache").exists()
    entries = adapter_files.parse_manifest((Path(reference) / checkpoint.MANIFEST).read_bytes(), reference)
    assert set(entries) == {"adapter_config.json", "adapter_model.safetensors", "learner/optimizer.pt"}


def adapter(folder: Path, alpha: int = 32) -> Path:
    """A local checkpoint with an adapter of one small file."""

    def write(target: Path) -> None:
        (target / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha, "r": 16}))
        (target / "adapter_model.safetensors").write_bytes(b"weights")
        (target / checkpoint.STATE).mkdir()
        (target / checkpoint.STATE / "optimizer").write_bytes(b"moments")

    checkpoint.write_atomically(folder, write)
    return folder


def test_an_amplified_copy_has_the_same_weights_and_is_gone_afterwards(adapters: AdapterStore, tmp_path: Path) -> None:
    version = adapter(tmp_path / "checkpoints" / "0001")
    with amplified(str(version), 8.0) as reference:
        copy = adapters.fetch(reference)
        assert json.loads((copy / "adapter_config.json").read_text()) == {"lora_alpha": 256.0, "r": 16}
        assert (copy / "adapter_model.safetensors").samefile(version / "adapter_model.safetensors")
        assert not (copy / checkpoint.STATE).exists()
        assert checkpoint.next_path(version.parent).name == "0002"
    assert [entry.name for entry in version.parent.iterdir()] == ["0001"]


def test_an_amplified_copy_in_object_storage_is_made_by_each_reader(adapters: AdapterStore, tmp_path: Path) -> None:
    adapters.publish(adapter(tmp_path / "0001"), f"{ROOT}/0001")
    with amplified(f"{ROOT}/0001", 0.5) as reference:
        assert reference == f"{ROOT}/0001x0.5"
        for _ in range(2):
            copy = adapters.fetch(reference, state=False)
            assert json.loads((copy / "adapter_config.json").read_text())["lora_alpha"] == 16.0
            assert (copy / "adapter_model.safetensors").read_bytes() == b"weights"
    assert adapters.next_reference(ROOT) == f"{ROOT}/0002"


def test_weights_that_are_not_the_manifests_are_neither_copied_nor_named(tmp_path: Path) -> None:
    version = adapter(tmp_path / "0001")
    assert weights_checksum(str(version)) == adapter_files.digest_of(version / "adapter_model.safetensors")
    (version / "adapter_model.safetensors").write_bytes(b"Weights")
    with pytest.raises(CheckpointDamaged, match="has changed since"):
        weights_checksum(str(version))
    with pytest.raises(CheckpointDamaged, match="manifest says"), amplified(str(version), 2.0):
        pass
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == ["0001"]
    assert weights_checksum("/nowhere/0001") is None
