"""The console script `lightning-piper`.

It is separate from `lightning_piper`, which imports torch and lightning. So `--version`, `--help` and errors
of the command line do not wait for these imports. The commands are in `lightning_piper.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_piper_cli.arguments import parser_of
from lightning_piper_cli.certificate.checker import verify
from lightning_piper_cli.targets import UsageError, check_program, check_target


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and print its text. If the command raises a PiperError, print the error to stderr.

    Args:
        argv: Arguments without the program's name (default: the arguments of the process).

    Returns:
        The exit status: 0, or 1 after a PiperError.

    Raises:
        SystemExit: The command line is wrong (status 2), or asks for the help or the version (status 0).
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser = parser_of(any(text.partition("=")[0] == "--run" for text in given))
    args = parser.parse_args(given)
    if args.command == "certificate":
        return verify(args.file)
    try:
        if "module" in args:
            check_target(args.module)
            check_target(args.batch)
        if "directives" in args:
            check_program(args.directives)
    except UsageError as error:
        parser.error(str(error))

    from lightning_piper.cli import run  # torch and lightning
    from lightning_piper.errors import PiperError

    try:
        text = run(args)
    except UsageError as error:
        parser.error(str(error))
    except PiperError as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    if text:
        print(text)
    return 0
