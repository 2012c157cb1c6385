# SPDX-License-Identifier: Apache-2.0
"""Prove the built-in pattern files and record it, so that users need not.

Writes ``coda_inductor/patterns/proven.json``, the digest of each file. Run it after editing a file
under ``patterns/``; until then the file is proven where it is used, once a machine, in a few
seconds. A test fails as long as the record is not that of the files.

Usage: python3 tools/record_proofs.py
"""

from __future__ import annotations

import json

from coda_inductor.patterns import builtin_folder
from coda_inductor.patterns.prove import prove
from coda_inductor.patterns.source import read, run
from coda_inductor.patterns.verdict import SHIPPED


def main() -> None:
    """Prove, then write; a file that cannot be proven is an error and leaves the record alone."""
    record = {}
    for path in sorted(builtin_folder().glob("*.py")):
        source = read(path)
        for pattern in run(source):
            print(f"{path.name}: {pattern.name}: {', '.join(prove(pattern))}")
        record[path.name] = source.digest
    SHIPPED.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
