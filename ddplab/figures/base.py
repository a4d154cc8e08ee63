"""Figure: what every interactive figure of the book shares.

A figure is one small Python class and one JavaScript module. Python gives the state (plain data), a still picture and
a sentence; the module's `render({ model, el })` draws the state and lets the reader change it. That is the signature
that anywidget uses, so the same module also serves as an anywidget. What IPython gets is one self-contained piece of
HTML: it works in JupyterLab, in VS Code, on the built page, from file://, and asks nobody for anything. Where scripts
do not run (paper, an untrusted notebook) the still and the sentence remain.

A new figure takes about forty lines. Python, `links.py`:

    class LinkLoads(Figure):
        module = "links.js"

        def __init__(self, loads: dict[str, int], caption: str = "") -> None:
            super().__init__(caption, names=list(loads), loads=list(loads.values()), top=max(loads.values()))

        def svg(self) -> str:       # the still: no script, no outside reference, readable on white
            return still_svg(320, 30, '<text x="8" y="20">...</text>')

        def text(self) -> str:      # the same in one or two sentences
            return f"Bytes on each link; the busiest carries {max(self.state['loads'])}."

JavaScript, `links.js`:

    import { h, range, bytes } from "./kit.js";
    function render({ model, el }) {
      const out = h("p", { "aria-live": "polite" });
      const draw = () => { out.textContent = bytes(model.get("top")); };
      model.on("change:top", draw);
      el.append(range(model, "top", "Scale", { max: 1e9, text: bytes }), out);
      draw();
    }
    export default { render };

Rules: keep all state in `model` (two figures on a page share nothing); make controls with the functions of `kit.js`,
which give them a name and keep JupyterLab from taking their arrow keys; colour with currentColor and the `--ddp-*`
variables of `figure.css`, so that light and dark follow the page; never by colour alone. `import` works for files of
this folder: `Figure.esm` joins them into one module, in which top-level names must therefore differ.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.-]+\.js)";\n', re.MULTILINE)

# The still is an <img>: that survives the sanitizer of an untrusted notebook, which drops script, svg and ids.
# Figures mount by class and not by id: JupyterLab can hold the same output twice (two views of one notebook).
_PAGE = """<figure class="ddplab-figure {uid}" data-figure="{name}">
<style>{css}</style>
<img class="ddp-still" alt="{text}" src="data:image/svg+xml;base64,{still}">
{caption}<script type="application/json">{state}</script>
<script type="module">
{js}
for (const box of document.querySelectorAll(".{uid}:not([data-live])")) {{
  box.dataset.live = "";
  const state = JSON.parse(box.querySelector('script[type="application/json"]').textContent);
  const listeners = {{}};
  const model = {{
    get: key => state[key],
    set(key, value) {{ state[key] = value; (listeners["change:" + key] || []).forEach(call => call()); }},
    on(event, call) {{ (listeners[event] ||= []).push(call); }},
    off() {{}},
    save_changes() {{}},
  }};
  const el = document.createElement("div");
  figure.render({{ model, el }});
  box.querySelector("img.ddp-still").replaceWith(el);
}}
</script>
</figure>"""


class Figure:
    """An interactive figure: subclass it, set `module`, give `svg()` and `text()`.

    `state` holds whatever the module reads through `model.get(...)`; it must survive JSON. The HTML depends on nothing
    else, so a page that shows the figure changes only when the figure does.
    """

    module = ""

    def __init__(self, caption: str = "", **state: Any) -> None:
        self.caption = caption
        self.state = state

    def svg(self) -> str:
        """The first frame as a self-contained SVG document."""
        raise NotImplementedError

    def text(self) -> str:
        """What the first frame shows, in words."""
        raise NotImplementedError

    @classmethod
    def esm(cls) -> str:
        """The figure's script as one ES module with `export default { render }`, its imports joined in."""
        return _joined(cls.module)

    def html(self) -> str:
        """The figure as one piece of HTML for a notebook's output or any page."""
        js = self.esm().replace("export default", "const figure =")
        state = json.dumps(self.state, sort_keys=True, allow_nan=False).replace("<", "\\u003c")
        css = (HERE / "figure.css").read_text("utf-8")
        # a blank line would end the HTML block where a Markdown renderer meets it
        js, css = (re.sub(r"\n\s*\n", "\n", part).strip() for part in (js, css))
        digest = hashlib.sha256("\0".join((js, css, state, self.caption)).encode()).hexdigest()
        return _PAGE.format(
            uid=f"ddp-{digest[:10]}",
            name=self.module.removesuffix(".js"),
            css=css,
            text=html.escape(self.text()),
            still=base64.b64encode(self.svg().encode()).decode(),
            caption=f"<figcaption>{html.escape(self.caption)}</figcaption>\n" if self.caption else "",
            state=state,
            js=js,
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "image/svg+xml": self.svg(), "text/plain": self.text()}


@functools.cache
def _joined(name: str) -> str:
    """The text of a module of this folder with the modules it imports in front of it, each once."""
    seen: dict[str, str] = {}

    def visit(file: str, *, imported: bool) -> None:
        if file in seen:
            return
        source = (HERE / file).read_text("utf-8")
        for wanted in _IMPORT.findall(source):
            visit(wanted, imported=True)
        body = _IMPORT.sub("", source)
        seen[file] = re.sub(r"^export (?!default)", "", body, flags=re.MULTILINE) if imported else body

    visit(name, imported=False)
    js = "".join(seen.values())
    if "</script" in js:
        raise ValueError(f"{name} must not contain '</script': it would end the figure's own script element")
    return js


def still_svg(width: float, height: float, body: str) -> str:
    """An SVG document of this size: `body` on white, in a sans-serif font of 12 units, dark grey."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" font-family="system-ui, sans-serif" font-size="12" fill="#222">'
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#fff"/>{body}</svg>'
    )
