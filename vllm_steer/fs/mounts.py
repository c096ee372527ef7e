# SPDX-License-Identifier: Apache-2.0
"""File systems on which several hosts can share a folder that is protected by locks and atomic renames."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """The mount that contains a path (proc_pid_mountinfo(5))."""

    kind: str
    """Type of the file system, e.g. ``ext4``."""
    options: frozenset[str]
    """Options of the mount and of its file system."""


_CACHED = "other hosts can see changes some seconds late, because the client caches attributes"
_NEEDS_GLOBAL_LOCKS = "locks hold on all hosts only if the file system is configured for them"

WARNED: Mapping[str, str] = MappingProxyType(
    {
        "9p": "it is not known whether locks hold on all hosts",
        "beegfs": _NEEDS_GLOBAL_LOCKS,
        "ceph": _CACHED,
        "fuse.ceph": _CACHED,
        "fuse.ceph-fuse": _CACHED,
        "fuse.glusterfs": _CACHED,
        "fuse.juicefs": _CACHED,
        "gpfs": _NEEDS_GLOBAL_LOCKS,
        "lustre": _NEEDS_GLOBAL_LOCKS,
        "nfs": _CACHED,
        "nfs4": _CACHED,
        "virtiofs": "it is not known whether locks hold on all hosts",
    }
)
"""Risk of file systems that several hosts can share, by type."""

_OBJECT_STORE = "object stores have neither locks nor atomic renames"
_SMB = "it cannot replace a file that another process has open"
_NO_LOCKS = "it has no locks that hold on all hosts"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "cifs": _SMB,
        "fuse.blobfuse2": _OBJECT_STORE,
        "fuse.gcsfuse": _OBJECT_STORE,
        "fuse.mountpoint-s3": _OBJECT_STORE,
        "fuse.rclone": _OBJECT_STORE,
        "fuse.s3fs": _OBJECT_STORE,
        "fuse.sshfs": _NO_LOCKS,
        "smb3": _SMB,
        "vboxsf": _NO_LOCKS,
    }
)
"""Reason why a file system is refused, by type."""

_NFS_LOCAL_LOCKS = frozenset({"nolock", "local_lock=all", "local_lock=flock"})
REFUSED_OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {"nfs": _NFS_LOCAL_LOCKS, "nfs4": _NFS_LOCAL_LOCKS, "lustre": frozenset({"localflock"})}
)
"""Mount options with which locks hold on one host only, by type."""


def is_networked(kind: str) -> bool:
    """Return whether a file system of this type can be shared by several hosts."""
    return kind in WARNED or kind in REFUSED


def find_refusal(mount: Mount) -> str | None:
    """Return why the mount cannot hold a shared folder, or None."""
    local = sorted(mount.options & REFUSED_OPTIONS.get(mount.kind, frozenset()))
    if local:
        return f"its mount option {local[0]} makes locks hold on one host only"
    return REFUSED.get(mount.kind)


def mount_of(path: Path) -> Mount | None:
    """Return the mount that contains ``path``, or None if the system does not list mounts."""
    try:
        # Names of mounts are bytes. Each may also contain a carriage return and others that split a line of text.
        lines = os.fsdecode(MOUNTINFO.read_bytes()).split("\n")
    except OSError:
        return None
    wanted, found, depth = path.resolve(), None, -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(rest) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]))
        if wanted.is_relative_to(point) and len(point.parts) >= depth:  # a later mount covers an earlier one
            found, depth = Mount(rest[0], frozenset((*fields[5].split(","), *rest[2].split(",")))), len(point.parts)
    return found
