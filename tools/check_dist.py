"""Build wheel and sdist, install each in an empty environment away from the sources, run the smoke tests there.

    python tools/check_dist.py

The smoke tests are in the package (`pytest --pyargs kpool.cli.smoke`), so what is tested is what was installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("kpool/__init__.py", "kpool/py.typed", "kpool_testing/__init__.py", "kpool_testing/py.typed")


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command, say which, stop at the first that fails."""
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, stdin=subprocess.DEVNULL)


def names(archive: Path) -> list[str]:
    """Paths in a wheel or sdist, from the package's own top."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as tar:
        return [name.split("/", 1)[-1].removeprefix("src/") for name in tar.getnames()]


def check(archive: Path, scratch: Path) -> None:
    """Contents, then an installation of its own, then the smoke tests and the command line."""
    missing = sorted(set(NEEDED) - set(names(archive)))
    if missing:
        raise SystemExit(f"{archive.name} lacks {', '.join(missing)}")
    home = scratch / archive.suffix.lstrip(".")
    venv.create(home, with_pip=True)
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    requirement = f"kpool[cli] @ {archive.as_uri()}"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", requirement, "pytest", cwd=scratch)
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "kpool.cli.smoke", cwd=scratch)
    run(python, "-m", "kpool.cli", "info", cwd=scratch)


def main() -> None:
    """Build and check both."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", scratch, ROOT, cwd=scratch)
        archives = sorted(scratch.glob("kpool-*"))
        if len(archives) != 2:
            raise SystemExit(f"expected one wheel and one sdist, got {[a.name for a in archives]}")
        for archive in archives:
            check(archive, scratch)
    print(f"{len(archives)} passed, 0 failed")


if __name__ == "__main__":
    main()
