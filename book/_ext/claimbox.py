"""Claim boxes by id, rendered from `book/claims.yml`.

A box links to the cell that asserts its verdict; every code cell tagged `claim-*` is an anchor for that, and every box
is one for the table of all claims (`ledger.py`). Evidence that
does not exist, an unknown id and a cell that was not executed are warnings, and the build takes none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from ddplab.claims import VERDICTS, load_claims
from ddplab.pages import PageError

log = logging.getLogger(__name__)


def anchor(page: str, tag: str) -> str:
    """The label of a claim's cell or box on a page."""
    return f"{page}#{tag}".lower()


def link(env: Any, text: str, label: str) -> addnodes.pending_xref:
    return addnodes.pending_xref(
        "",
        nodes.inline("", text),
        refdomain="std",
        reftype="ref",
        reftarget=label,
        refexplicit=True,
        refwarn=True,
        refdoc=env.docname,
    )


class ClaimDirective(SphinxDirective):
    def claims(self) -> dict[str, dict[str, Any]]:
        path = Path(self.env.srcdir) / self.config.claims_file
        self.env.note_dependency(str(path))  # an edited ledger renews every page that shows it
        try:
            return load_claims(path)
        except PageError as error:
            raise self.error(str(error)) from None

    def evidence(self, claim: dict[str, Any]) -> list[nodes.Node]:
        """Where the claim is settled: a link to the cell, the source's own words, or both."""
        found, evidence = [], claim["evidence"]
        if "notebook" in evidence:
            label = anchor(evidence["notebook"], evidence["tag"])
            found.append(link(self.env, "the cell that asserts it", label))
        if "source" in evidence:
            if found:
                found.append(nodes.Text("; "))
            for block in self.parse_text_to_nodes(evidence["source"]):
                found += block.children
        return found


class Claim(ClaimDirective):
    """```{claim} C21```: what the article says, what is right, and the evidence."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        claim = self.claims().get(self.arguments[0])
        if claim is None:
            raise self.error(f"there is no claim {self.arguments[0]} in {self.config.claims_file}")
        name, verdict = claim["id"], claim["verdict"]
        box = nodes.admonition("", classes=["claim", f"claim-{verdict}"], ids=[f"box-{name.lower()}"])
        title = f"Claim {name}" + (f", {claim['title']}" if claim.get("title") else "")
        box += nodes.title("", "", nodes.Text(f"{title}: "), nodes.strong("", VERDICTS[verdict]))
        said = nodes.container(classes=["claim-says"])
        said += self.parse_text_to_nodes(f"The article says: {claim['says']}")
        box += said
        box += self.parse_text_to_nodes(str(claim["correct"]))
        box += nodes.paragraph("", "", nodes.Text("Evidence: "), *self.evidence(claim), classes=["claim-evidence"])
        self.set_source_info(box)
        return [box]


def check_cells(app: Any, doctree: nodes.document) -> None:
    """Give each claim cell and each box its anchor, and refuse a code cell without an execution count."""
    std, page = app.env.get_domain("std"), app.env.docname

    def add(tag: str) -> None:
        std.labels[anchor(page, tag)] = page, tag.lower(), tag
        std.anonlabels[anchor(page, tag)] = page, tag.lower()

    for box in doctree.findall(nodes.admonition):
        if "claim" in box["classes"]:
            add(box["ids"][0])
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") != "cell_code":
            continue
        if cell["exec_count"] is None and cell.astext().strip():
            log.warning("a code cell was not executed", location=cell, type="claims", subtype="unexecuted")
        for tag in cell["cell_metadata"].get("tags", []):
            if tag.startswith("claim-"):
                if tag.lower() not in cell["ids"]:
                    cell["ids"].append(tag.lower())
                add(tag)


def setup(app: Any) -> dict[str, Any]:
    app.add_config_value("claims_file", "book/claims.yml", "env")
    app.add_directive("claim", Claim)
    app.connect("doctree-read", check_cells)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
