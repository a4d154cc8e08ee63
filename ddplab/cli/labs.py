"""List the labs of this checkout, copy their exercise versions (the answers taken out) to a folder, or run their cores.

Nothing that is there already is overwritten, unless --force says so; a copy is made whole or not at all. A core is what
a lab measures, in small and with checks: on ranks of this machine or, under torchrun, on those of the job."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from ddplab.cli import output
from ddplab.cli.checkout import find
from ddplab.cli.values import Problem, count, did_you_mean, named, one_of

EXAMPLE = """ddplab labs
ddplab labs copy ~/ddplab-labs 02
ddplab labs run 02 09
torchrun --standalone --nproc-per-node 4 -m ddplab labs run"""
BESIDE = ("data", "results")  # what labs read, in folders beside them


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", type=one_of(("list", "copy", "run"), "action"), default="list", help="list (default), "
        "copy or run")  # fmt: skip
    parser.add_argument(
        "folder", nargs="?", type=named("a folder"), help="copy: where the copies go; it is made if it is missing"
    )
    parser.add_argument("name", nargs="*", help="labs to copy or to run, by name or number (default: all)")
    parser.add_argument("--force", action="store_true", help="copy: overwrite labs that are in the folder already")
    parser.add_argument("--ranks", type=count, metavar="N", help="run: default 4, under torchrun those of the job")
    parser.add_argument(
        "--device", type=one_of(("auto", "cpu", "cuda"), "device"), help="run: auto (default), cpu or cuda"
    )
    parser.add_argument("--json", action="store_true", help="print the list, or the rows of a run, as JSON")


def run(args: argparse.Namespace) -> None:
    if args.action == "run":
        from ddplab.cli import labs_run

        labs_run.run(args)
        return
    if args.ranks or args.device:
        raise Problem("--ranks and --device belong to 'ddplab labs run'")
    root = find("the list of labs")
    labs = {path.stem: path for path in sorted((root / "labs").glob("[0-9][0-9]_*.ipynb"))}
    if not labs:
        raise Problem(f"there are no labs in {root / 'labs'}", 1)
    if args.action == "copy":
        if not args.folder:
            raise Problem("copy needs a folder (see 'ddplab labs --help')")
        chosen = [_choose(name, labs) for name in args.name] or list(labs.values())
        _copy(chosen, _place(args.folder), args.force, root)
        return
    if args.folder is not None:
        raise Problem("list takes no folder; did you mean 'ddplab labs copy FOLDER'?")
    rows = [{"name": name, "title": _title(path), "path": str(path)} for name, path in labs.items()]
    if args.json:
        output.print_json({"labs": rows})
        return
    width = max(map(len, labs))
    for row in rows:
        line = f"{row['name']:<{width}}  {row['title']}"
        print(line if len(line) <= 80 else line[:76] + " ...")


def _title(path: Path) -> str:
    """The first heading of a notebook, read as plain JSON."""
    try:
        cells = json.loads(path.read_text("utf8"))["cells"]
        lines = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown").splitlines()
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(f"{path} is not a notebook: {error}", 1) from error
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")


def _choose(name: str, labs: dict[str, Path]) -> Path:
    wanted = Path(name).name.removesuffix(".ipynb")
    number = f"{int(wanted):02d}_" if wanted.isascii() and wanted.isdigit() else f"{wanted}_"
    for stem, path in labs.items():
        if stem == wanted or stem.startswith(number):
            return path
    hint = did_you_mean(wanted, labs) or f"; labs are {', '.join(labs)}"
    raise Problem(f"unknown lab '{name}'{hint}")


def _place(text: str) -> Path:
    """The folder that the user means; a Problem where something that is no folder stands in its way."""
    try:
        folder = Path(text).expanduser()
    except RuntimeError as error:  # ~somebody, who is not known here
        raise Problem(f"cannot find the folder '{text}': {error}") from error
    for place in (folder, *folder.parents):
        if os.path.lexists(place) and not os.path.isdir(place):
            raise Problem(f"'{place}' is not a folder; name one, or a place where one can be made")
    return folder


def _copy(labs: list[Path], folder: Path, force: bool, root: Path) -> None:
    """Prepare everything beside its destination, look for what is in the way, and only then move it there."""
    from ddplab.exercises import write_exercises
    from ddplab.stage import PageError

    if folder.resolve().is_relative_to(root / "labs"):
        raise Problem(f"'{folder}' is the labs' own folder; the copies belong outside of it")
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".ddplab-", dir=folder))
    except OSError as error:
        _unmake(made)
        raise Problem(f"cannot write to '{folder}': {error.strerror}") from error
    try:
        write_exercises(labs, draft)
        for name in BESIDE:
            if (root / "labs" / name).is_dir():
                shutil.copytree(root / "labs" / name, draft / name)
        new = [path.relative_to(draft) for path in sorted(draft.rglob("*")) if path.is_file()]
        same = {path for path in new if (folder / path).is_file() and _equal(folder / path, draft / path)}
        blocked = [path for path in new if path not in same and os.path.lexists(folder / path)]
        if blocked and not force:
            raise Problem(f"'{folder / blocked[0]}' exists already; nothing was copied (--force overwrites)")
        _move([path for path in new if path not in same], draft, folder)
    except PageError as error:
        raise Problem(f"{error}", 1) from error
    except OSError as error:
        raise Problem(f"cannot write to '{folder}': {error.strerror}; nothing was copied", 1) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        _unmake(made)  # leaves a folder that has files in it
    for path in new:
        print(folder / path)


def _move(new: list[Path], draft: Path, folder: Path) -> None:
    """Move each file to its place; if one cannot be moved, put everything back as it was."""
    backup, done = draft / ".backup", []
    made = [folder / name for name in BESIDE if not (folder / name).exists()]
    try:
        for path in new:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            done.append(path)
            if os.path.lexists(folder / path):
                (backup / path).parent.mkdir(parents=True, exist_ok=True)
                os.rename(folder / path, backup / path)
            os.rename(draft / path, folder / path)
    except BaseException:
        for path in reversed(done):
            if (backup / path).exists():
                os.replace(backup / path, folder / path)
            elif not (draft / path).exists():
                (folder / path).unlink(missing_ok=True)
        _unmake(made)
        raise


def _equal(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def _unmake(made: list[Path]) -> None:
    for place in made:
        try:
            place.rmdir()
        except OSError:  # not empty, or never made
            return
