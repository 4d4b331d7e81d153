"""Lists or blanks the GPU code in shared objects: python fatbin.py list FILE... | keep ARCH FILE...

`keep 90` overwrites with zeros, in place, the payload of every fatbin entry that a GPU of compute capability 9.0 never
takes, so that the file compresses well. Headers, offsets and file size stay, so nothing is relocated. A container
without machine code for ARCH keeps its newest PTX that is not above ARCH.
"""

import collections
import mmap
import struct
import sys

MAGIC = b"\x50\xed\x55\xba"
PTX, ELF = 1, 2


def containers(data):
    at = data.find(MAGIC)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if version == 1 and header == 16 and at + 16 + size <= len(data):
            yield at, size
            at = data.find(MAGIC, at + 16 + size)
        else:
            at = data.find(MAGIC, at + 4)


def entries(data, at, size):
    place, end = at + 16, at + 16 + size
    while place + 64 <= end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", data, place)
        arch = struct.unpack_from("<I", data, place + 0x1C)[0]
        if kind == 0 or header < 64:
            break
        yield kind, arch, place + header, payload
        place += header + payload


def main():
    mode, rest = sys.argv[1], sys.argv[2:]
    keep = int(rest.pop(0)) if mode == "keep" else None
    for name in rest:
        with open(name, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            total, kept, ptx_kept = collections.Counter(), 0, 0
            for at, size in list(containers(data)):
                found = list(entries(data, at, size))
                for kind, arch, _, payload in found:
                    total["ptx" if kind == PTX else "sm" if kind == ELF else f"kind{kind}", arch] += payload
                if keep is None:
                    continue
                wanted = [entry for entry in found if entry[0] == ELF and entry[1] == keep]
                if not wanted:
                    below = [entry for entry in found if entry[1] <= keep and entry[0] == PTX]
                    wanted = [max(below, key=lambda entry: entry[1])] if below else []
                    wanted += [e for e in found if e[0] == ELF and e[1] // 10 == keep // 10 and e[1] <= keep]
                    ptx_kept += len(below) > 0
                for entry in found:
                    if entry in wanted:
                        kept += entry[3]
                    else:
                        data[entry[2] : entry[2] + entry[3]] = bytes(entry[3])
            print(name, {f"{k}{a}": round(s / 1e6, 1) for (k, a), s in sorted(total.items())}, end=" ")
            print(f"kept {kept / 1e6:.1f} MB, {ptx_kept} containers by PTX" if keep else "")


main()
