# SPDX-License-Identifier: Apache-2.0
"""Write vllm_steer/models/digests.json for the installed versions; with --check, fail if it is out of date.

Run it after a recipe was added and proven, or after ``make test-all`` has passed on another version of vLLM or
Transformers; the digests of earlier versions are kept.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.conformance.kernels import media_stubs
from vllm_steer.models import digests
from vllm_steer.models.recipes import PROVEN, RECIPES

FILE = Path(digests.__file__).with_name(digests.FILE)


def installed_digests() -> dict[str, dict[str, str]]:
    """Return the digests of the proven classes in the packages that are installed here.

    A class that cannot be imported here, such as one for another platform, is omitted, unless its ``forward`` is
    inherited from a class that can.
    """
    table: dict[str, dict[str, str]] = {}
    for name in sorted(PROVEN):
        recipe = RECIPES[name]
        package = name.partition(".")[0]
        version = f"{package} {import_module(package).__version__.partition('+')[0]}"
        for source in filter(None, (name, recipe.inherits)):
            module, _, cls = source.rpartition(".")
            try:
                digest = digests.digest_of(getattr(import_module(module), cls), recipe.inner_class)
            except ImportError:
                continue
            table.setdefault(version, {})[name] = digest
            break
    return table


def main() -> None:
    written = json.loads(FILE.read_text()) if FILE.exists() else {}
    table = {version: dict(found) for version, found in written.items()}
    with media_stubs():
        installed = installed_digests()
    for version, found in installed.items():
        # Digests of classes that cannot be imported here stay.
        table.setdefault(version, {}).update(found)
    table = {version: {name: found[name] for name in found if name in PROVEN} for version, found in table.items()}
    known = {name for found in table.values() for name in found}
    for missing in sorted(PROVEN - known):
        print(f"no digest of {missing}: it cannot be imported here", file=sys.stderr)
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    if FILE.exists() and FILE.read_text() == text:
        return
    if "--check" in sys.argv:
        sys.exit(f"{FILE.name} is out of date; run python scripts/digests.py")
    FILE.write_text(text)


if __name__ == "__main__":
    main()
