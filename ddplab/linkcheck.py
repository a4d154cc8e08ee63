"""Do the book's links to other sites still lead somewhere? Sphinx asks each of them; here the answers are sorted.

    python -m ddplab.linkcheck .

A link is dead where its site says so (404, 410) or does not exist. A site that refuses robots, has a bad day or is slow
proves nothing: such links are listed, for a person to try. Links within the book are the tests' business, and need no
network. Nothing is executed: the sources of the pages are read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import yaml

from ddplab.pages import PageError

_SECONDS = 20  # for one answer
_OPTIONS = {
    "linkcheck_timeout": _SECONDS,
    "linkcheck_retries": 2,
    "linkcheck_workers": 8,
    "linkcheck_anchors": False,  # many sites make theirs with scripts
    "linkcheck_allow_unauthorized": True,
    "linkcheck_report_timeouts_as_broken": False,
    "linkcheck_rate_limit_timeout": 60,
}
_GONE = re.compile(r"\b(404|410) Client Error|Name or service not known|NameResolutionError|No address associated")


class Link(NamedTuple):
    """One link of a page: where it stands, what the site answered, and whether it is "ok", "dead" or "unknown"."""

    page: str
    line: int
    url: str
    state: str
    answer: str


def check_links(root: Path) -> list[Link]:
    """Ask for every outside link of the pages in `_toc.yml`, each address once. PageError where Sphinx cannot run."""
    with tempfile.TemporaryDirectory(prefix="ddplab-links-") as folder:
        config = yaml.safe_load((root / "_config.yml").read_text("utf8"))
        config.setdefault("execute", {})["execute_notebooks"] = "off"
        config.setdefault("sphinx", {}).setdefault("config", {}).update(_OPTIONS)
        settings = Path(folder) / "_config.yml"
        settings.write_text(yaml.safe_dump(config, allow_unicode=True), "utf8")
        tool = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", str(root), "-q"]
        options = ["--builder", "linkcheck", "--config", str(settings), "--path-output", folder]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUTF8": "1", "NO_COLOR": "1"}
        done = subprocess.run([*tool, *options], env=env, text=True, capture_output=True)
        found = list(Path(folder).rglob("output.json"))
        if not found:  # the exit code tells nothing: Sphinx counts a site's bad day as an error
            raise PageError("the links were not checked:\n" + (done.stdout + done.stderr)[-2000:])
        answers = [json.loads(line) for line in found[0].read_text("utf8").splitlines()]
    return [_link(a) for a in answers if a["uri"].startswith(("http://", "https://"))]


def _link(answer: dict) -> Link:
    status, info = answer["status"], " ".join(str(answer["info"]).split())
    if status in ("working", "redirected"):
        state = "ok"
    else:
        state = "dead" if status == "broken" and _GONE.search(info) else "unknown"
    return Link(answer["filename"], answer["lineno"], answer["uri"], state, info or status)


def page(links: list[Link]) -> str:
    """What was found, in Markdown, dead links first."""
    count = {state: sum(link.state == state for link in links) for state in ("ok", "dead", "unknown")}
    lines = [f"# {len(links)} links: {count['dead']} dead, {count['unknown']} to be tried by hand", ""]
    for state, title in (("dead", "Dead"), ("unknown", "No clear answer")):
        chosen = sorted(link for link in links if link.state == state)
        if chosen:
            lines += [f"## {title}", ""]
            lines += [f"- {link.page}, line {link.line}: <{link.url}>: {link.answer[:200]}" for link in chosen] + [""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddplab.linkcheck", description=__doc__.split("\n")[0])
    parser.add_argument("root", type=Path, help="the folder of _toc.yml")
    root = parser.parse_args(argv).root.resolve()
    try:
        links = check_links(root)
    except (PageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = page(links)
    (root / "_build").mkdir(exist_ok=True)
    (root / "_build/links.md").write_text(text, "utf8")
    print(text)
    if not any(link.state == "ok" for link in links):
        print("error: no link at all answered; is there a network?", file=sys.stderr)
        return 1
    return int(any(link.state == "dead" for link in links))


if __name__ == "__main__":
    sys.exit(main())
