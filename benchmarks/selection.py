"""How fast is the selection against the plain public algorithm and the machine's limit? JSON on stdout.

    python benchmarks/selection.py --lengths 4096,8192,16384,32768 --order position

The same as `kpool bench --json`: nothing is reported while a result is wrong (exit code 1).
"""

from __future__ import annotations

import sys

from kpool.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--json", *sys.argv[1:]]))
