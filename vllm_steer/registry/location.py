# SPDX-License-Identifier: Apache-2.0
"""Locations of a registry: a folder, or a database given by its URL.

A URL can contain a password. `show_location` returns the form for messages and logs, without user, password and query.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from vllm_steer.errors import SteeringError, install_hint

DATABASES = ("sqlite", "postgresql")
"""Schemes of database URLs."""
EXAMPLES = "sqlite:///registry.db or postgresql://user@host/database"
HIDDEN = "***@"
"""Replaces user and password where a URL is shown."""

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):/|(?P<database>(?i:postgres|sqlite)[a-z0-9+]*):")
_MODULES = {"sqlite": ("sqlalchemy",), "postgresql": ("sqlalchemy", "psycopg")}


def is_url(location: str) -> bool:
    """Return whether a location is a URL rather than a folder."""
    return _URL.match(location) is not None


def split_url(location: str, field: str) -> SplitResult:
    """Return the parts of a database URL.

    Raises:
        SteeringError: For ``field``, if the URL is invalid. The message contains no part that can be a password.
    """
    found = _URL.match(location)
    scheme = "" if found is None else found["scheme"] or found["database"]
    if scheme not in DATABASES or not location.startswith(f"{scheme}://"):
        raise SteeringError(field, f"scheme {scheme!r} is not supported; use a folder, {EXAMPLES}")
    parts = urlsplit(location)
    if scheme == "sqlite":  # a path, in which nothing is percent-encoded
        if parts.netloc or parts.path in ("", "/", "/:memory:"):
            raise SteeringError(field, "a SQLite URL is sqlite:///relative/path or sqlite:////absolute/path")
        if parts.query or parts.fragment or location[-1] in "?#":
            raise SteeringError(field, "the path of a SQLite database cannot contain '?' or '#'; rename it")
        return parts
    if "@" in parts.path + parts.query + parts.fragment or parts.netloc.count("@") > 1:
        raise SteeringError(field, "'@', '/', '?' and '#' in a user name or password must be percent-encoded")
    try:
        _ = parts.port
    except ValueError:
        raise SteeringError(field, "the port of the database URL must be a number from 0 to 65535") from None
    if parts.fragment:
        raise SteeringError(field, "a database URL has no fragment; write '#' as %23")
    return parts


def show_location(location: str) -> str:
    """Return a location without credentials."""
    if not is_url(location):
        return location
    try:
        parts = split_url(location, "")
    except SteeringError:
        return "a database URL"
    user, _, host = parts.netloc.rpartition("@")
    secret = bool(user) or bool(parts.query)
    return f"{parts.scheme}://{HIDDEN if secret else ''}{host}{parts.path}"


def parse_location(location: str, field: str) -> str:
    """Return a location with absolute paths. ``~`` is expanded, which shells do not do in ``--steering-registry=~/x``.

    Raises:
        SteeringError: For ``field``, if it is empty, is an invalid database URL or has ``~`` of an unknown user, or a
            package for that database is missing.
    """
    if not location:
        raise SteeringError(field, "is empty; name a folder, such as registry, or . for the present one")
    if not is_url(location):
        return str(_absolute(Path(location), field))
    parts = split_url(location, field)
    missing = [name for name in _MODULES[parts.scheme] if find_spec(name) is None]
    if missing:
        hint = install_hint("database")
        raise SteeringError(field, f"{parts.scheme} databases need the package {missing[0]}; {hint}")
    if parts.scheme == "sqlite":
        return f"sqlite:///{_absolute(sqlite_path(parts), field)}"
    return location


def _absolute(path: Path, field: str) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise SteeringError(field, f"{path}: {error}") from None


def sqlite_path(parts: SplitResult) -> Path:
    """Return the path in a SQLite URL: ``sqlite:///a`` is relative, ``sqlite:////a`` absolute."""
    return Path(parts.path.removeprefix("/"))
