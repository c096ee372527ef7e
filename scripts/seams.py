# SPDX-License-Identifier: Apache-2.0
"""Write vllm_steer/compat/seams.json: signature and digest of every seam in each recorded version of vLLM.

    python scripts/seams.py                  the installed version
    python scripts/seams.py 0.33.0 x.whl     other versions, which pip downloads, or wheels
    python scripts/seams.py --check          fail if the record of the installed version is out of date

Records of other versions stay. Seams that are new in the table are missing from them until these versions are given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.releases.open_source import open_source
from vllm_steer.compat import seam_digests
from vllm_steer.compat.seam_digests import SeamSource, recorded_parts
from vllm_steer.compat.seams import SEAMS

OUTPUT = Path(seam_digests.__file__).with_name(seam_digests.FILE)


def dump(table: Mapping[str, Mapping[str, SeamSource | None]]) -> str:
    """Return the text of ``seams.json``: for each seam its variants, each with the versions that have it."""
    result: dict[str, list[dict[str, object]]] = {}
    for path in sorted({seam.path for seam in SEAMS}):
        variants: dict[tuple[str, str] | None, list[str]] = {}
        for version in sorted(table):
            variants.setdefault(recorded_parts(table[version].get(path)), []).append(version)
        result[path] = [
            {"versions": versions, **({} if key is None else {"signature": key[0], "digest": key[1]})}
            for key, versions in variants.items()
        ]
    lines = (f" {json.dumps(path)}: {json.dumps(variants)}" for path, variants in result.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    table = {version: dict(found) for version, found in seam_digests.recorded().items()} if OUTPUT.exists() else {}
    for name in [argument for argument in sys.argv[1:] if argument != "--check"] or ["installed"]:
        tree = open_source(name)
        table[tree.label] = seam_digests.read_seams(tree)
    text = dump(table)
    if "--check" not in sys.argv:
        OUTPUT.write_text(text)
    elif OUTPUT.read_text() != text:
        sys.exit(f"{OUTPUT.name} is out of date; run python scripts/seams.py")


if __name__ == "__main__":
    main()
