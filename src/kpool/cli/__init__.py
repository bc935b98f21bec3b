"""The front door: `kpool verify | plan | bench | info`.

Each command is a module with `add_parser(commands)`, which declares its arguments and sets `run`, a function from the
parsed arguments to an exit code.

Exit codes: 0 yes; 1 no: a difference was found; 2 not decided: too few rows have a clear margin; 64 the command line
or an input file cannot be used; 69 something that the command needs is missing here; 130 interrupted; 141 nobody
reads the output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kpool.cli.exits import BROKEN_PIPE, INTERRUPTED, UNAVAILABLE, USAGE, CommandError


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 on a bad command line; here 2 is a verdict."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    from kpool.cli import bench, info, plan, verify

    parser = _Parser(
        prog="kpool",
        description="Exact, sharded k-pool token selection: see it, check it, measure it.",
        epilog="Start with `kpool verify`; `kpool COMMAND --help` explains one command.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in (verify, plan, bench, info):
        command.add_parser(commands)
    return parser


def _let_threads_sleep(arguments: Sequence[str]) -> None:
    """Have OpenMP's threads wait asleep instead of spinning; it reads this when torch is loaded.

    Spinning is a little faster on a machine of one's own, which is what `bench` measures, and several times slower on
    cores that others use.
    """
    if "torch" not in sys.modules and arguments[:1] != ["bench"]:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments, without the program's name; None means those of the process.
    """
    arguments = sys.argv[1:] if argv is None else argv
    _let_threads_sleep(arguments)
    try:
        parser = build_parser()
        if not arguments:
            parser.print_help(sys.stderr)
            parser.exit(USAGE)
        args = parser.parse_args(argv)
        return int(args.run(args))
    except ModuleNotFoundError as error:
        package = (error.name or "kpool").partition(".")[0]
        if package in ("kpool", "kpool_testing"):
            raise
        print(  # noqa: T201
            f"kpool: {package} is not installed; the command line needs: python -m pip install 'kpool[cli]'",
            file=sys.stderr,
        )
        return UNAVAILABLE
    except CommandError as error:
        print(f"kpool: error: {error}", file=sys.stderr)  # noqa: T201
        return error.code
    except BrokenPipeError:  # `kpool plan | head`: nobody reads on, and the interpreter must not flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("kpool: interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED
