# SPDX-License-Identifier: Apache-2.0
"""Writes vllm_steer/models/digests.json for the versions installed; with --check, says whether it is up to date.

To be run after a recipe was added and proven, or after the whole of tests/conformance passed on another version of vLLM
or Transformers, whose digests are added to those of the versions before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.conformance.kernels import torchvision_in_name
from vllm_steer.models import digests
from vllm_steer.models.recipes import PROVEN

FILE = Path(digests.__file__).with_name(digests.FILE)


def main() -> None:
    written = json.loads(FILE.read_text()) if FILE.exists() else {}
    table = {version: dict(found) for version, found in written.items()}
    with torchvision_in_name():
        installed = digests.installed_digests()
    for version, found in installed.items():
        # What cannot be imported here may have been written elsewhere, and stays.
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
