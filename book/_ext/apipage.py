"""The API page: every public name of `ddplab`, by module, from its signature and docstring (read as Markdown)."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import ddplab

log = logging.getLogger(__name__)
_ITEM = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)")  # an argument, or several that share a sentence
_ROW = re.compile(r"([A-Za-z_]\w*) {2,}(?=\S)")  # of a table of names
_POINT = re.compile(r"(?:Paper|Bytes|Bias|Memory|Loses when|Sources?|Raises|Returns)\b")


def markdown(doc: str, known: Iterable[str] = ()) -> str:
    """A docstring as Markdown: what its indents and columns say to the eye becomes lists, and <name> is no HTML.

    `name: what it is` is an item in a section such as "Args:", and elsewhere if the name is `known`.
    """
    known = set(known)

    def names(text: str, indent: int) -> re.Match[str] | None:
        found = _ITEM.match(text)
        mine = found and {name.strip("* ") for name in found[1].split(",")} <= known
        return found if mine or (found and indent == 4) else _ROW.match(text) if indent in (0, 4) else None

    def apart(found: re.Match[str]) -> str:  # a second argument in one line stands behind two spaces
        return "\n" + found[1] + found[2] if names(found[2] + "x", 0) else found[0]

    doc = re.sub(r"(?<=\S) {2,}()((?:\w+, )*\w+: )(?=\S)", apart, doc) if known else doc
    lines, code, before, listed = [], False, "", None
    for line in doc.splitlines():
        text = line.lstrip()
        indent = len(line) - len(text)
        code = indent >= 4 and (code or not before)
        if not text:
            listed = None
        elif not code:
            found = names(text, indent)
            text = re.sub(r"(`[^`]*`)|<", lambda part: part[1] or r"\<", text)
            if found:
                if listed is None and before:
                    lines.append("")
                listed = indent
                text = f"- {', '.join(f'`{name}`' for name in found[1].split(', '))}: {text[found.end() :]}"
            elif listed is not None and indent >= listed and not _POINT.match(text):
                text = "  " + text  # goes on with the item
            elif before and (listed is not None or _POINT.match(text)):
                lines.append("")
                listed = None
        lines.append(line if code else text)
        before = text
    return "\n".join(lines)


def _parameter(p: inspect.Parameter) -> str:
    text, equals, default = str(p.replace(annotation=p.empty)).partition("=")
    if inspect.isclass(p.default) and p.default is not p.empty:
        default = p.default.__name__  # Python writes <class 'object'>, which is no Python
    if p.annotation is not p.empty:
        kind = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
        return f"{text}: {kind}" + (f" = {default}" if equals else "")
    return text + equals + default


def signature(name: str, value: Any, width: int = 90) -> str:
    """`def` or `class` line with parameters, types and defaults; on several lines where it is over `width`."""
    prefix = "class " if inspect.isclass(value) else "def "
    if inspect.isclass(value) and issubclass(value, BaseException):
        return f"class {name}({value.__bases__[0].__name__})"
    found = inspect.signature(value)
    parts, starred = [], False
    for p in found.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY)
        if p.name not in ("self", "cls"):
            parts.append(_parameter(p))
    returns = "" if found.return_annotation is found.empty or inspect.isclass(value) else found.return_annotation
    end = f") -> {returns if isinstance(returns, str) else inspect.formatannotation(returns)}" if returns else ")"
    line = f"{prefix}{name}({', '.join(parts)}{end}"
    if len(line) <= width:
        return line
    return f"{prefix}{name}(\n" + "".join(f"    {part},\n" for part in parts) + end


class Api(SphinxDirective):
    """```{api}```: a section for each module and in it one for each public name, in the package's own order."""

    def run(self) -> list[nodes.Node]:
        modules: dict[str, list[str]] = {}
        for name, module in ddplab._HOME.items():
            modules.setdefault(module, []).append(name)
        return [self.module(module, names) for module, names in modules.items()]

    def module(self, module: str, names: list[str]) -> nodes.section:
        try:
            code = importlib.import_module(f"ddplab.{module}")
        except ImportError as error:
            raise self.error(f"ddplab.{module} cannot be imported: {error}") from None
        self.env.note_dependency(inspect.getsourcefile(code))
        section = nodes.section(
            "", nodes.title("", "", nodes.literal("", f"ddplab.{module}")), ids=[f"module-{module}"]
        )
        section += self.doc(f"ddplab.{module}", code)
        for name in names:
            try:
                section += self.entry(name, getattr(ddplab, name))
            except AttributeError:
                log.warning("ddplab.%s has no %s", module, name, location=(self.env.docname, self.lineno), type="api")
        return section

    def entry(self, name: str, value: Any) -> nodes.section:
        section = nodes.section("", nodes.title("", name), ids=[f"ddplab-{name}"])
        if isinstance(value, dict):  # its docstring would be Python's
            kinds = " or ".join(sorted({type(kept).__name__ for kept in value.values()}))
            section += self.parse_text_to_nodes(f"A dictionary of `{kinds}`: {', '.join(f'`{key}`' for key in value)}.")
            return section
        if not callable(value):
            section += self.doc(name, value)
            return section
        section += nodes.literal_block("", signature(name, value), language="python")
        section += self.doc(name, value)
        if inspect.isclass(value):
            members = [self.member(value, key, raw) for key, raw in vars(value).items() if not key.startswith("_")]
            if members := [m for m in members if m is not None]:
                section += nodes.definition_list("", *members)
        return section

    def member(self, owner: type, key: str, raw: Any) -> nodes.definition_list_item | None:
        """A public method or property; None for a plain attribute, which the class's own docstring explains."""
        if isinstance(raw, property):
            head, value = key, raw.fget
        elif callable(inner := getattr(raw, "__func__", raw)) and not inspect.isclass(inner):
            head, value = signature(key, inner, width=10_000).removeprefix("def "), inner
        else:
            return None
        first = next((base for base in owner.__mro__ if getattr(vars(base).get(key), "__doc__", None)), owner)
        if not first.__module__.startswith("ddplab"):
            return None  # torch's words, in torch's markup
        term = nodes.term("", "", nodes.literal("", head))
        return nodes.definition_list_item("", term, nodes.definition("", *self.doc(f"{owner.__name__}.{key}", value)))

    def doc(self, name: str, value: Any) -> list[nodes.Node]:
        text = inspect.getdoc(value)
        if not text:
            log.warning("%s has no docstring", name, location=(self.env.docname, self.lineno), type="api")
            return []
        error = inspect.isclass(value) and issubclass(value, BaseException)  # Python knows no signature of these
        known = inspect.signature(value).parameters if callable(value) and not error else ()
        return self.parse_text_to_nodes(markdown(text, known))


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("api", Api)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
