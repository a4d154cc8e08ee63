"""Claim boxes by id, and the ledger of all claims, rendered from `book/claims.yml`.

A box links to the cell that asserts its verdict; every code cell tagged `claim-*` is an anchor for that. Evidence that
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


def _label(page: str, tag: str) -> str:
    return f"{page}#{tag}".lower()


class _ClaimDirective(SphinxDirective):
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
            found.append(
                addnodes.pending_xref(
                    "",
                    nodes.inline("", "the cell that asserts it"),
                    refdomain="std",
                    reftype="ref",
                    reftarget=_label(evidence["notebook"], evidence["tag"]),
                    refexplicit=True,
                    refwarn=True,
                    refdoc=self.env.docname,
                )
            )
        if "source" in evidence:
            if found:
                found.append(nodes.Text("; "))
            for block in self.parse_text_to_nodes(evidence["source"]):
                found += block.children
        return found


class Claim(_ClaimDirective):
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


class Ledger(_ClaimDirective):
    """```{claim-ledger}```: one row for each claim of the file."""

    def run(self) -> list[nodes.Node]:
        table, group = nodes.table(classes=["claim-ledger"]), nodes.tgroup(cols=4)
        table += group
        for width in (6, 14, 60, 20):
            group += nodes.colspec(colwidth=width)
        head, body = nodes.thead(), nodes.tbody()
        group += [head, body]

        def row(*cells: list[nodes.Node]) -> nodes.row:
            return nodes.row("", *(nodes.entry("", *cell) for cell in cells))

        titles = ("id", "verdict", "claim, and what is right", "evidence")
        head += row(*([nodes.paragraph("", title)] for title in titles))
        for claim in self.claims().values():
            texts = self.parse_text_to_nodes(f"*{claim['says']}*\n\n{claim['correct']}")
            mark = nodes.inline("", VERDICTS[claim["verdict"]], classes=["verdict", f"claim-{claim['verdict']}"])
            body += row(
                [nodes.paragraph("", claim["id"], ids=[f"row-{claim['id'].lower()}"])],
                [nodes.paragraph("", "", mark)],
                texts,
                [nodes.paragraph("", "", *self.evidence(claim))],
            )
        return [table]


def check_cells(app: Any, doctree: nodes.document) -> None:
    """Give each claim cell its anchor, and refuse a code cell without an execution count."""
    std, page = app.env.get_domain("std"), app.env.docname
    for cell in doctree.findall(nodes.container):
        if cell.get("nb_element") != "cell_code":
            continue
        if cell["exec_count"] is None and cell.astext().strip():
            log.warning("a code cell was not executed", location=cell, type="claims", subtype="unexecuted")
        for tag in cell["cell_metadata"].get("tags", []):
            if tag.startswith("claim-"):
                anchor = tag.lower()
                if anchor not in cell["ids"]:
                    cell["ids"].append(anchor)
                std.labels[_label(page, tag)] = page, anchor, tag
                std.anonlabels[_label(page, tag)] = page, anchor


def setup(app: Any) -> dict[str, Any]:
    app.add_config_value("claims_file", "book/claims.yml", "env")
    app.add_directive("claim", Claim)
    app.add_directive("claim-ledger", Ledger)
    app.connect("doctree-read", check_cells)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
