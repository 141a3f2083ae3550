"""Reads from a library what it asks of the machine that loads it: libraries, run paths and the version of glibc."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

# The libraries that every manylinux machine has.
ALLOWED = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libgcc_s.so.1",
}

_DT_NEEDED, _DT_RPATH, _DT_RUNPATH = 1, 15, 29
_SHT_DYNAMIC = 6


@dataclass
class Dynamic:
    """The dynamic section of an ELF file."""

    needed: list[str]
    run_paths: list[str]


def dynamic(path: Path) -> Dynamic:
    """Reads the dynamic section of a 64-bit little-endian ELF file; ValueError for any other."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    found = Dynamic([], [])
    for section in sections:
        if section[1] != _SHT_DYNAMIC:
            continue
        strings = sections[section[6]][4]
        for offset in range(section[4], section[4] + section[5], 16):
            tag, value = struct.unpack_from("<qQ", data, offset)
            if tag == 0:
                break
            if tag in (_DT_NEEDED, _DT_RPATH, _DT_RUNPATH):
                start = strings + value
                text = data[start : data.index(b"\0", start)].decode()
                (found.needed if tag == _DT_NEEDED else found.run_paths).append(text)
    return found


def needed(path: Path) -> tuple[int, int] | None:
    """The glibc version that the library needs, or None where it may not be called manylinux: it needs another
    library or has a run path."""
    elf = dynamic(path)
    if elf.run_paths or not set(elf.needed) <= ALLOWED:
        return None
    versions = {(int(m[1]), int(m[2])) for m in re.finditer(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())}
    return max(versions | {(2, 17)})
