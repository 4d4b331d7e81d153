"""Lists or blanks the GPU code in shared objects: python fatbin.py list FILE... | keep ARCH FILE...

`keep 90` overwrites with zeros, in place, the payload of every fatbin entry that a GPU of compute capability 9.0 never
takes, so that the file compresses well. Headers, offsets and file size stay, so nothing is relocated. A container
without machine code for ARCH keeps its newest PTX that is not above ARCH.
"""

from __future__ import annotations

import collections
import mmap
import struct
import sys
from collections.abc import Iterator

_MAGIC = b"\x50\xed\x55\xba"
_PTX, _ELF = 1, 2
_KINDS = {_PTX: "ptx", _ELF: "sm"}

Entry = tuple[int, int, int, int]  # kind, architecture, place of the payload, its bytes


def containers(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield place and size of every fatbin container."""
    at = data.find(_MAGIC)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if version == 1 and header == 16 and at + 16 + size <= len(data):
            yield at, size
            at = data.find(_MAGIC, at + 16 + size)
        else:
            at = data.find(_MAGIC, at + 4)


def entries(data: mmap.mmap, at: int, size: int) -> Iterator[Entry]:
    """Yield the entries of a container."""
    place, end = at + 16, at + 16 + size
    while place + 64 <= end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", data, place)
        arch = struct.unpack_from("<I", data, place + 0x1C)[0]
        if kind == 0 or header < 64:
            break
        yield kind, arch, place + header, payload
        place += header + payload


def wanted(found: list[Entry], keep: int) -> list[Entry]:
    """Return the entries that a GPU of architecture `keep` may take."""
    own = [entry for entry in found if entry[0] == _ELF and entry[1] == keep]
    if own:
        return own
    below = [entry for entry in found if entry[1] <= keep and entry[0] == _PTX]
    newest = [max(below, key=lambda entry: entry[1])] if below else []
    return newest + [e for e in found if e[0] == _ELF and e[1] // 10 == keep // 10 and e[1] <= keep]


def main() -> None:
    mode, rest = sys.argv[1], sys.argv[2:]
    keep = int(rest.pop(0)) if mode == "keep" else None
    for name in rest:
        total: collections.Counter[str] = collections.Counter()
        kept = 0
        with open(name, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            for at, size in list(containers(data)):
                found = list(entries(data, at, size))
                for kind, arch, _, payload in found:
                    total[f"{_KINDS.get(kind, kind)}{arch}"] += payload
                if keep is None:
                    continue
                chosen = wanted(found, keep)
                kept += sum(entry[3] for entry in chosen)
                for entry in found:
                    if entry not in chosen:
                        data[entry[2] : entry[2] + entry[3]] = bytes(entry[3])
        sizes = {label: round(size / 1e6, 1) for label, size in sorted(total.items())}
        print(name, sizes, "" if keep is None else f"kept {kept / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
