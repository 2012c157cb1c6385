# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel takes of a processor's registers, read from its object file.

QuACK's object files hold the GPU's code as an ELF image of its own, whose ``.nv.info`` sections say
for each function how many registers and how much stack its threads start with. A GEMM has no stack
but for registers that did not fit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ELF, _CUDA = b"\x7fELF", 190
#: A record of ``.nv.info`` with a payload of its own, and which ones are read: (function, value).
_SIZED, _REGISTERS, _STACK = 4, 0x2F, 0x11


@dataclass(frozen=True)
class Usage:
    """Of one thread of a kernel.

    Attributes:
        registers: that it starts with; warps of a GEMM trade them afterwards.
        spilled: bytes of registers that did not fit and lie in memory.
    """

    registers: int
    spilled: int

    def __str__(self) -> str:
        """``no register spilled``."""
        return (
            f"{self.spilled} bytes of registers a thread spilled"
            if self.spilled
            else ("no register spilled")
        )


def usage(path: Path) -> Usage | None:
    """Of the kernel in an object file, the most of all its functions; None where it says nothing.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    found: dict[int, list[int]] = {_REGISTERS: [], _STACK: []}
    start = data.find(_ELF, 1)
    while start >= 0:
        try:
            if struct.unpack_from("<H", data, start + 18)[0] == _CUDA:
                for attribute, value in _records(data[start:]):
                    found[attribute].append(value)
        except (struct.error, ValueError):  # another format of NVIDIA's
            return None
        start = data.find(_ELF, start + 1)
    if not found[_REGISTERS]:
        return None
    return Usage(max(found[_REGISTERS]), max(found[_STACK], default=0))


def _records(elf: bytes) -> Iterator[tuple[int, int]]:
    """(attribute, value) of all that are read in the image's ``.nv.info``."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    for name, _, _, _, start, length in sections:
        text = sections[names][4] + name
        if elf[text : elf.index(b"\0", text)] != b".nv.info":
            continue
        at = start
        while at < start + length:
            form, attribute, more = struct.unpack_from("<BBH", elf, at)
            at += 4
            if form == _SIZED:
                if attribute in (_REGISTERS, _STACK):
                    yield attribute, struct.unpack_from("<II", elf, at)[1]
                at += more
