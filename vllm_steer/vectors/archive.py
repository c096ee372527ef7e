# SPDX-License-Identifier: Apache-2.0
"""Reader of zip archives whose sizes are not trusted.

Python's ``zipfile`` decompresses beyond the size that an archive states, accepts members that share their data or their
name, and copies extra fields once for each of their parts. Here all sizes are checked before a member is decompressed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from vllm_steer.errors import SteeringError
from vllm_steer.request.scalars import shown

_END, _ENTRY, _LOCAL = struct.Struct("<4s4H2LH"), struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
"""End of the directory, an entry of it, and the header of a member, without texts."""
_ENCRYPTED = 1
_STORED, _DEFLATED = 0, 8


class _Member(NamedTuple):
    """A member, as the directory states it."""

    method: int
    size: int
    """Bytes after decompression."""
    checksum: int
    header: int
    """Offset of the header, behind which the data are."""
    start: int
    stop: int

    def read(self, archive: bytes) -> bytes:
        """Return the content."""
        data = archive[self.start : self.stop]
        if self.method == _DEFLATED:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.size + 1)
        if len(data) != self.size or zlib.crc32(data) != self.checksum:
            raise ValueError("a member of the archive has another size or checksum than the archive states")
        return data


def read_archive(data: bytes, max_members: int, max_bytes: int) -> dict[str, bytes]:
    """Return the members of an archive by name.

    Args:
        data: The archive.
        max_members: Most members.
        max_bytes: Most bytes of all members together, after decompression.

    Raises:
        SteeringError: There are more members or bytes, or two members have one name.
        ValueError: The archive is damaged. Also `struct.error` and `zlib.error`.
    """
    end = len(data) - _END.size
    signature, *_, count, length, at, _ = _END.unpack_from(data, max(end, 0))
    if signature != b"PK\x05\x06" or at + length > end:
        raise ValueError("the archive has no directory at its end")
    if count > max_members:
        raise SteeringError("file", f"has {count} tensors; at most {max_members} are read")
    directory, members = at, dict[str, _Member]()
    for _ in range(count):
        name, member, at = _read_entry(data, at)
        if name in members:
            raise SteeringError("file", f"has two members with the name {shown(name)}; remove one of them")
        members[name] = member
    check_ranges(((member.header, member.stop) for member in members.values()), 0, directory)
    if (size := sum(member.size for member in members.values())) > max_bytes:
        raise SteeringError("file", f"has {size} bytes after decompression; at most {max_bytes} are read of this file")
    return {name: member.read(data) for name, member in members.items()}


def check_ranges(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> None:
    """Raise ValueError unless the ranges of bytes are disjoint and within ``start`` and ``stop``."""
    for first, last in sorted(ranges):
        if not start <= first <= last <= stop:
            raise ValueError("two parts share bytes, or a part is outside of the data")
        start = last


def _read_entry(data: bytes, at: int) -> tuple[str, _Member, int]:
    """Return the name and the member of an entry of the directory, and where the next entry begins."""
    entry = _ENTRY.unpack_from(data, at)
    signature, _, _, flags, method, _, _, checksum, packed, size, *lengths, _, _, _, header = entry
    local, *_, local_name, local_extra = _LOCAL.unpack_from(data, header)
    begin = at + _ENTRY.size
    name = data[begin : begin + lengths[0]].decode()
    start = header + _LOCAL.size + local_name + local_extra
    if (signature, local) != (b"PK\x01\x02", b"PK\x03\x04"):
        raise ValueError("the directory of the archive is damaged")
    if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED):
        raise ValueError(f"the member {shown(name)} is encrypted, or compressed with another method than deflate")
    if data[header + _LOCAL.size : header + _LOCAL.size + local_name] != name.encode():
        raise ValueError(f"the member {shown(name)} has two names")
    return name, _Member(method, size, checksum, header, start, start + packed), begin + sum(lengths)
