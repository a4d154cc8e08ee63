"""Where the book's sources are: labs and chapters live in the repository, not in the installed package."""

from __future__ import annotations

from pathlib import Path

from ddplab.cli.values import Problem


def find(purpose: str) -> Path:
    """The checkout around the working folder, else the one this package runs from.

    Raises Problem where there is neither; `purpose` says what it was wanted for.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        raise Problem("the working folder was deleted; go to another one", 1) from error
    package = Path(__file__).resolve().parents[1]
    for folder in (here, *here.parents, package.parent):
        if all((folder / part).exists() for part in ("_toc.yml", "book", "labs", "ddplab/__init__.py")):
            return folder
    raise Problem(
        f"{purpose} needs a checkout of the repository (_toc.yml, book/ and labs/), and there is none in or above "
        f"{here}; clone it and call ddplab there",
        1,
    )
