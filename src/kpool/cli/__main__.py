"""`python -m kpool.cli`, where the script `kpool` is not on the path."""

from kpool.cli import main

raise SystemExit(main())
