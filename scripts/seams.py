# SPDX-License-Identifier: Apache-2.0
"""Write vllm_steer/compat/seams.json: signature and digest of every seam in each recorded version of vLLM.

    python scripts/seams.py                  the installed version
    python scripts/seams.py 0.33.0 x.whl     other versions, which pip downloads, or wheels
    python scripts/seams.py --check          fail if the record of the installed version is out of date

Records of other versions stay. Seams that are new in the table are missing from them until these versions are given.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_steer.compat import seam_digests
from vllm_steer.compat.sources import open_source

OUTPUT = Path(seam_digests.__file__).with_name(seam_digests.FILE)


def main() -> None:
    table = {version: dict(found) for version, found in seam_digests.recorded().items()} if OUTPUT.exists() else {}
    for name in [argument for argument in sys.argv[1:] if argument != "--check"] or ["installed"]:
        tree = open_source(name)
        table[tree.label] = seam_digests.read_seams(tree)
    text = seam_digests.dump(table)
    if "--check" not in sys.argv:
        OUTPUT.write_text(text)
    elif OUTPUT.read_text() != text:
        sys.exit(f"{OUTPUT.name} is out of date; run python scripts/seams.py")


if __name__ == "__main__":
    main()
