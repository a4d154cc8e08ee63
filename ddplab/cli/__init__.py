"""The command line: `ddplab COMMAND [ARGUMENTS]`, also `python -m ddplab`.

A command is one module of this folder with three names: `EXAMPLE` (shown by --help), `arguments(parser)` and
`run(args) -> int | None`, the exit code. Nothing of a command is imported before it is called, and a command imports
what it works with inside `run`, so that --help and mistakes are answered at once.

A command may be a group, such as `nccl`: then it has `EXAMPLE` and `ACTIONS` (action -> its line in --help), and the
action `log` is the module `nccl_log`, with the three names of a command.

Exit codes: 0 done, 1 the work failed or is not possible here, 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from ddplab import __version__
from ddplab._files import words
from ddplab.cli.output import visible
from ddplab.cli.values import Problem, did_you_mean

COMMANDS = {
    "doctor": "what this machine can run: backends, GPUs, ranks, hosts, versions",
    "bench": "measure a collective on real ranks, in the columns of nccl-tests",
    "predict": "seconds and bytes of every schedule on N ranks, without running it",
    "trace": "where a run's time went, from the profiler traces of its ranks",
    "nccl": "NCCL: its environment checked, its logs read, its cost model, sweeps",
    "links": "watch the traffic of links, read dcgmi and nvidia-smi texts, judge",
    "why": "why a job hung, died or crawled, from what it left in a folder",
    "labs": "list the labs, copy their exercise versions, or run their cores",
    "book": "execute the notebooks and build the book, or open it",
}


class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one sentence and proposes the option that was probably meant."""

    def __init__(self, **keywords: object) -> None:
        keywords.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **keywords)
        # By Python 3.14's rule: "-1gbit" and "-4K" are values, if wrong ones, and not unknown options.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument ([^-][^:]*: )?", "", message)  # an option is named, a place in the line is not
        raise Problem(f"{message} (see '{self.prog} --help')")

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:
        nested = any(action.nargs == argparse.PARSER for action in self._actions)
        # Intermixed: `labs copy FOLDER --force NAME` is as good as `labs copy FOLDER NAME --force`.
        parsed, rest = (self.parse_known_args if nested else self.parse_known_intermixed_args)(args, namespace)
        if rest:
            known = [option for action in self._actions for option in action.option_strings]
            what = "option" if rest[0].startswith("-") else "argument"
            self.error(f"unknown {what} '{rest[0]}'{did_you_mean(rest[0], known)}")
        return parsed


def overview() -> str:
    """The text of `ddplab --help`."""
    commands = "\n".join(f"  {name:<9} {line}" for name, line in COMMANDS.items())
    return (
        "usage: ddplab COMMAND [ARGUMENTS]\n\nHow DistributedDataParallel moves gradients, and how fast.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n  --help     this text; 'ddplab COMMAND --help' explains a command\n"
        "  --version  print the version\n\n"
        "example:\n  ddplab predict --ranks 8 --size 100M --link 10gbit\n"
    )


def _overview_of(name: str, command: ModuleType) -> str:
    """The text of `ddplab nccl --help`, for a command that is a group of actions."""
    actions = "\n".join(f"  {action:<9} {line}" for action, line in command.ACTIONS.items())
    return (
        f"usage: ddplab {name} ACTION [ARGUMENTS]\n\n{_about(command)}\n\nactions:\n{actions}\n\n"
        f"options:\n  --help     this text; 'ddplab {name} ACTION --help' explains an action\n\n"
        f"example:\n{textwrap.indent(command.EXAMPLE, '  ')}\n"
    )


def _about(command: ModuleType) -> str:
    """A command's docstring, filled to the width of a terminal."""
    return "\n\n".join(textwrap.fill(" ".join(part.split()), 79) for part in command.__doc__.split("\n\n"))


def _known(word: str, words: dict[str, str], what: str, program: str) -> None:
    if word not in words:
        hint = did_you_mean(word, words) or f"; {what}s are {', '.join(words)}"
        raise Problem(f"unknown {what} '{word}'{hint} (see '{program} --help')")


def _run(argv: list[str]) -> int:
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        print(overview(), end="")
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"ddplab {__version__}")
        return 0
    name, *rest = argv
    if name.startswith("-"):
        raise Problem(f"unknown option '{name}'; a command comes first, its options after it (see 'ddplab --help')")
    _known(name, COMMANDS, "command", "ddplab")
    command = importlib.import_module(f"ddplab.cli.{name}")
    if hasattr(command, "ACTIONS"):
        if not rest or rest[0] in ("-h", "--help"):
            print(_overview_of(name, command), end="")
            return 0
        _known(rest[0], command.ACTIONS, "action", f"ddplab {name}")
        action, *rest = rest
        command, name = importlib.import_module(f"ddplab.cli.{name}_{action}"), f"{name} {action}"
    example = "example:\n" + textwrap.indent(command.EXAMPLE, "  ")
    parser = Parser(prog=f"ddplab {name}", description=_about(command), epilog=example)
    command.arguments(parser)
    try:
        return command.run(parser.parse_args(rest)) or 0
    except Problem as problem:
        problem.command = f"ddplab {name}"
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: `sys.argv[1:]`) and return its exit code; never raises for bad input."""
    try:
        if sys.stdout is not None and hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal gets escapes, not a traceback
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as end:  # argparse, after --help
            code = end.code if isinstance(end.code, int) else 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except Problem as problem:
        if os.environ.get("RANK", "0") == "0":  # under torchrun every rank reads the same line; one answers
            print(visible(f"{problem.command}: {problem}"), file=sys.stderr)
        return problem.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141  # what a program killed by SIGPIPE reports: the reader (head, less) has left
    except OSError as error:
        if error.filename is not None:  # a file that no command looked after
            print(visible(f"ddplab: '{error.filename}': {words(error)}"), file=sys.stderr)
            return 1
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):  # what a write can meet
            raise
        _silence_stdout()
        print(f"ddplab: cannot write to standard output: {words(error)}", file=sys.stderr)
        return 1


def _silence_stdout() -> None:
    """Point stdout at nothing: the interpreter flushes what is left when it exits, and would complain."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file, as in a test: nothing is left to flush
        pass
