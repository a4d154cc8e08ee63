"""Check the environment variables that NCCL, gloo and torch read: names that nobody reads, values that mean something
else, settings without effect, settings that hurt. It checks the environment, with what NCCL adds to it from
NCCL_CONF_FILE, ~/.nccl.conf and /etc/nccl.conf; given NAME=VALUE, it checks these instead.

With --knobs it explains variables instead: those whose name or explanation holds one of the words, or all. An exact
name gets its whole card.

Exit code 0: nothing found. 1: there are findings."""

from __future__ import annotations

import argparse
import os

from ddplab.cli import output
from ddplab.cli.given import given
from ddplab.cli.values import Problem, named

EXAMPLE = """\
ddplab nccl check
ddplab nccl check NCCL_PROTO=LL NCCL_BUFFSIZE=8MB
ddplab nccl check --transport nvlink NCCL_NSOCKS_PERTHREAD=4
ddplab nccl check --knobs NCCL_BUFFSIZE"""

_COLUMNS = {"name": "variable", "default": "default", "touch": "touch", "what": "what it does"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE", help="check these (default: the environment)")
    parser.add_argument("--transport", metavar="T", help="carries the data: nvlink, pcie, shm, socket, ib, net, or T+T")
    parser.add_argument(
        "--log", type=named("a log"), metavar="FILE", help="take transport and version from this NCCL_DEBUG=INFO log"
    )
    parser.add_argument("--nccl", metavar="VERSION", help="the NCCL version, to find variables that came later")
    parser.add_argument("--knobs", action="store_true", help="explain variables; then the words are what to look for")
    parser.add_argument("--json", action="store_true", help="print the findings, or the variables, as JSON")


def run(args: argparse.Namespace) -> int:
    if args.knobs and (args.transport or args.log or args.nccl):
        raise Problem("--knobs explains variables; --transport, --log and --nccl belong to a check of their values")
    if args.knobs:
        return _explain(args.words, args.json)
    from dataclasses import asdict

    from ddplab.nccl.conf import Setting, conf_files, conf_repeats, repeats, with_conf_files
    from ddplab.nccl.env import check_env

    if args.words:
        settings = [Setting(*_setting(word), f"argument {i}") for i, word in enumerate(args.words, 1)]
        environ = {name: value for name, value, _ in settings}
        twice = repeats(settings, counts=-1, because="as in a shell")
    else:
        environ, twice = with_conf_files(os.environ), conf_repeats(os.environ)
    log = given([args.log]) if args.log else None
    try:
        found = twice + check_env(environ, transport=args.transport, log=log, version=args.nccl)
    except (ValueError, OSError) as error:
        raise Problem(str(error)) from error
    if args.json:
        output.print_json({"findings": [asdict(finding) for finding in found]})
        return int(bool(found))
    for finding in found:
        setting = output.coloured(_printable(f"{finding.variable}={finding.value}"), 33)
        print(f"{setting}\n  {_printable(_sentence(finding.problem))}\n  {_printable(_sentence(finding.remedy))}")
    if not found:
        print("Nothing to complain about.")
    if not args.words and (files := conf_files(os.environ)):
        print(f"({' and '.join(map(str, files))} included)")
    return int(bool(found))


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise Problem(f"'{text}' is not NAME=VALUE, as in NCCL_DEBUG=INFO")
    return name, value


def _printable(text: str) -> str:
    """A value may hold anything; a terminal gets no control characters from it, and no endless line."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 400 else text[:400] + " ..."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith("?") else ".")


def _explain(words: list[str], as_json: bool) -> int:
    from dataclasses import asdict

    from ddplab.nccl.knobs import knobs, nearest

    known = knobs()
    exact = bool(words) and all(word.upper() in known for word in words)
    if exact:
        chosen = [known[word.upper()] for word in words]
    else:
        wanted = [word.lower() for word in words] or [""]
        chosen = [knob for knob in known.values() if any(word in f"{knob.name} {knob.what}".lower() for word in wanted)]
    if not chosen:
        meant = nearest(words[0], known)
        hint = f"; did you mean {meant}?" if meant else ""
        raise Problem(f"no variable is called or explained by '{' '.join(words)}'{hint}")
    if as_json:
        output.print_json({"knobs": [asdict(knob) for knob in chosen]})
    elif exact:
        print("\n".join(map(_card, chosen)))
    else:
        print(output.table([asdict(knob) for knob in chosen], _COLUMNS))
    return 0


def _card(knob) -> str:
    from ddplab.nccl.knobs import SCOPES, TOUCH
    from ddplab.nccl.reading import legal

    unit = f", in {knob.unit}" if knob.unit else ""
    return (
        f"{knob.name} ({knob.library}{f', since {knob.since}' if knob.since else ''})\n  {_sentence(knob.what)}\n"
        f"  values   {legal(knob) or 'any text'}{unit}\n"
        f"  default  {knob.default or 'none: it depends on the machine'}\n"
        f"  acts on  {SCOPES[knob.scope]}\n  touch    {TOUCH[knob.touch]}"
    )
