"""The API page: every public name of `ddplab`, by module, from its signature and docstring (read as Markdown)."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import ddplab

log = logging.getLogger(__name__)


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
        if not callable(value):
            section += self.doc(name, value)
            return section
        section += nodes.literal_block("", signature(name, value), language="python")
        section += self.doc(name, value)
        if inspect.isclass(value):
            members = [self.member(name, key, raw) for key, raw in vars(value).items() if not key.startswith("_")]
            if members := [m for m in members if m is not None]:
                section += nodes.definition_list("", *members)
        return section

    def member(self, owner: str, key: str, raw: Any) -> nodes.definition_list_item | None:
        """A public method or property; None for a plain attribute, which the class's own docstring explains."""
        if isinstance(raw, property):
            head, value = key, raw.fget
        elif callable(inner := getattr(raw, "__func__", raw)) and not inspect.isclass(inner):
            head, value = signature(key, inner, width=10_000).removeprefix("def "), inner
        else:
            return None
        term = nodes.term("", "", nodes.literal("", head))
        return nodes.definition_list_item("", term, nodes.definition("", *self.doc(f"{owner}.{key}", value)))

    def doc(self, name: str, value: Any) -> list[nodes.Node]:
        text = inspect.getdoc(value)
        if not text:
            log.warning("%s has no docstring", name, location=(self.env.docname, self.lineno), type="api")
            return []
        return self.parse_text_to_nodes(text)


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("api", Api)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
