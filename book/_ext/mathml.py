"""Formulas as MathML, made at build time: the browser draws them itself, without any script or font of ours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

log = logging.getLogger(__name__)
_ARITY = {"mfrac": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}


def to_mathml(latex: str, block: bool) -> str:
    """The MathML of one formula. ValueError where the converter would show raw LaTeX or an incomplete formula."""
    # Sphinx numbers equations itself, and the converter knows only the starred environment.
    several = r"\\(begin|end)\{(align|aligned|split|gather|gathered|equation)\*?\}"
    latex = re.sub(several, r"\\\1{align*}", latex.strip())
    if block and r"\\" in latex and r"\begin{" not in latex:
        latex = rf"\begin{{align*}}{latex}\end{{align*}}"
    try:
        text = convert(latex, display="block" if block else "inline")
        tree = ET.fromstring(text)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    for element in tree.iter():
        name = element.tag.rpartition("}")[2]
        if unknown := re.search(r"\\[A-Za-z]+", element.text or ""):
            raise ValueError(f"no MathML for {unknown[0]}")
        if name in _ARITY and len(element) != _ARITY[name]:
            raise ValueError("a part of a fraction or an index is missing")
    # Inside \text the converter leaves the backslash of an escaped sign.
    text = re.sub(r"\\([_%#])", r"\1", text)
    # Few fonts have the sign that the converter takes for \setminus; and it is an operator.
    text = text.replace("<mi>&#x029F5;</mi>", "<mo>&#x02216;</mo>")
    # TeX sets a slash without space; as a MathML operator it would get some.
    return text.replace("<mo>&#x0002F;</mo>", '<mo lspace="0" rspace="0">&#x0002F;</mo>')


def _html(translator: Any, node: nodes.Element, block: bool) -> str:
    try:
        return to_mathml(node.astext(), block)
    except ValueError as error:
        log.warning("formula %r: %s", node.astext(), error, location=node, type="mathml")
        return translator.encode(node.astext())


def visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_html(translator, node, block=False))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="math notranslate nohighlight"))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({get_node_equation_number(translator, node)})')
        translator.add_permalink_ref(node, "Link to this equation")
        translator.body.append("</span>")
    translator.body.append(_html(translator, node, block=True) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
