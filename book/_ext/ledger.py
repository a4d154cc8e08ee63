"""The table of all claims: where each is settled, what its cell measured in this build, and what nobody measured here.

`claim-count` is a role: {claim-count}`false` is the number of claims with that verdict, so that no page types it.
The filter above the table is a script; without it every row is shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from claimbox import ClaimDirective, anchor, link
from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxRole

from ddplab.claims import VERDICTS, load_claims
from ddplab.pages import PageError
from ddplab.predicates import outcome, wanted

COUNTS = {
    "all": lambda claim: True,
    "measured": lambda claim: "predicate" in claim,
    "not-measured": lambda claim: "not_measured" in claim,
    **{verdict: lambda claim, verdict=verdict: claim["verdict"] == verdict for verdict in VERDICTS},
}


class Ledger(ClaimDirective):
    """```{claim-ledger}```: one row for each claim of the file."""

    def run(self) -> list[nodes.Node]:
        claims = self.claims()
        measured = self.measured({c["evidence"]["notebook"] for c in claims.values() if "predicate" in c})
        table, group = nodes.table(classes=["claim-ledger"]), nodes.tgroup(cols=4)
        table += group
        for width in (6, 17, 47, 30):
            group += nodes.colspec(colwidth=width)
        head, body = nodes.thead(), nodes.tbody()
        group += [head, body]

        def row(*cells: list[nodes.Node], **attributes: Any) -> nodes.row:
            return nodes.row("", *(nodes.entry("", *cell) for cell in cells), **attributes)

        titles = ("id", "verdict", "claim, and what is right", "evidence")
        head += row(*([nodes.paragraph("", title)] for title in titles))
        for claim in claims.values():
            name, title = claim["id"], f"**{claim['title']}.** " if claim.get("title") else ""
            mark = nodes.inline("", VERDICTS[claim["verdict"]], classes=["verdict"])
            body += row(
                [nodes.paragraph("", "", self.box(claim), ids=[f"row-{name.lower()}"])],
                [nodes.paragraph("", "", mark)],
                self.parse_text_to_nodes(f"{title}*{claim['says']}*\n\n{claim['correct']}"),
                self.proof(claim, measured.get(name, {})),
                classes=[f"claim-{claim['verdict']}"],
            )
        self.env.metadata[self.env.docname]["claim-ledger"] = True
        return [table]

    def measured(self, notebooks: set[str]) -> dict[str, dict[str, Any]]:
        """By claim, the values that its cell showed when this book was built; nothing for a page that did not run."""
        found = {}
        for notebook in sorted(notebooks):
            path = Path(self.env.srcdir) / f"{notebook}.ipynb"
            if not path.exists():
                continue
            self.env.note_dependency(str(path))
            for cell in json.loads(path.read_text("utf8"))["cells"]:
                for output in cell.get("outputs", []):
                    if shown := output.get("metadata", {}).get("ddplab"):
                        found[shown["claim"]] = shown["measured"]
        return found

    def box(self, claim: dict[str, Any]) -> nodes.Node:
        page = claim["evidence"].get("notebook") or claim["evidence"].get("shown")
        return link(self.env, claim["id"], anchor(page, f"box-{claim['id']}")) if page else nodes.Text(claim["id"])

    def proof(self, claim: dict[str, Any], values: dict[str, Any]) -> list[nodes.Node]:
        """The chapter, the link to the cell or the source, the values, and how to measure what was not measured."""
        found: list[nodes.Node] = []
        evidence = claim["evidence"]
        if page := evidence.get("notebook") or evidence.get("shown"):
            reference = addnodes.pending_xref(
                "", nodes.inline(), refdomain="std", reftype="doc", reftarget=f"/{page}", refexplicit=False,
                refwarn=True, refdoc=self.env.docname,
            )  # fmt: skip
            found.append(nodes.paragraph("", "", reference, classes=["chapter"]))
        found.append(nodes.paragraph("", "", *self.evidence(claim)))
        if rules := claim.get("predicate"):
            ran = "Found in this build, as expected:" if values else "A cell must measure:"
            found.append(nodes.paragraph("", ran))
            found.append(nodes.bullet_list("", *(self.line(n, r, values.get(n)) for n, r in rules.items())))
        if "not_measured" in claim:
            found += self.parse_text_to_nodes(f"**Not measured here:** {claim['not_measured']}")
        return found

    def line(self, name: str, rule: dict[str, Any], value: Any) -> nodes.list_item:
        what, shown, expected = outcome(name, rule, value)
        text = [nodes.strong("", shown), nodes.Text(expected)] if value is not None else [nodes.Text(wanted(rule))]
        return nodes.list_item("", nodes.paragraph("", "", nodes.Text(f"{what} = "), *text))


class Count(SphinxRole):
    """{claim-count}`false`: how many claims have this verdict, or are `all`, `measured` or `not-measured`."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        path = Path(self.env.srcdir) / self.config.claims_file
        self.env.note_dependency(str(path))
        try:
            claims = load_claims(path)
            if self.text not in COUNTS:
                raise PageError(f"claim-count {self.text!r} is none of {', '.join(COUNTS)}")
        except PageError as error:
            message = self.inliner.reporter.error(str(error), line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        return [nodes.Text(str(sum(map(COUNTS[self.text], claims.values()))))], []


def add_filter(app: Any, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    if app.env.metadata.get(page, {}).get("claim-ledger"):
        app.add_js_file("ledger.js", loading_method="defer")


def setup(app: Any) -> dict[str, Any]:
    app.setup_extension("claimbox")
    app.add_directive("claim-ledger", Ledger)
    app.add_role("claim-count", Count())
    app.connect("html-page-context", add_filter)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
