"""Questions to the reader. Before a chapter: predictions to choose from. After it: questions whose answers are folded.

    ```{quiz}
    - ask: Four GPUs each hold 100 MB. What must each of them send, at the least?
      options: [100 MB, 150 MB, 300 MB]
      answer: 2
      why: $2 (N-1)/N$ of the buffer.
    - ask: Without options it is a question to answer in one's own words.
      why: What a good answer holds.
    ```

`answer` counts from 1. All texts are MyST. The page needs no kernel; without scripts the answers can still be unfolded.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import yaml
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

_KEYS = {"ask", "options", "answer", "why"}


@dataclass(frozen=True)
class Question:
    """One question. options: what to choose from, none for a question in one's own words; answer: from 1."""

    ask: str
    why: str
    options: tuple[str, ...] = ()
    answer: int = 0


def questions(text: str) -> list[Question]:
    """The questions of a directive's text. ValueError says which is wrong, and how."""
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the quiz is no YAML: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError("a quiz is a list of questions, each with `ask` and `why`")
    found = []
    for i, entry in enumerate(entries, 1):
        where = f"question {i} of the quiz"
        if not isinstance(entry, dict) or not {"ask", "why"} <= entry.keys() or entry.keys() - _KEYS:
            raise ValueError(f"{where}: it has `ask` and `why`, and may have `options` with `answer`; no other key")
        options, answer = entry.get("options", []), entry.get("answer", 0)
        if ("options" in entry) != ("answer" in entry) or not isinstance(options, list) or len(options) == 1:
            raise ValueError(f"{where}: `options` are two or more, and need an `answer`")
        if options and (type(answer) is not int or not 1 <= answer <= len(options)):
            raise ValueError(f"{where}: `answer` is a number from 1 to {len(options)}, not {answer!r}")
        if any(not isinstance(option, str | int | float) or isinstance(option, bool) for option in options):
            raise ValueError(f"{where}: an option is no text; put quotes round yes and no")
        if len({str(option) for option in options}) < len(options):
            raise ValueError(f"{where}: two of its options are the same")
        found.append(Question(str(entry["ask"]), str(entry["why"]), tuple(map(str, options)), answer))
    return found


class Quiz(SphinxDirective):
    """A list of questions; those with options are predictions, which a small script marks as right or wrong."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            asked = questions("\n".join(self.content))
        except ValueError as error:
            raise self.error(str(error)) from None
        start = self.env.temp_data.get("quiz_questions", 0)
        self.env.temp_data["quiz_questions"] = start + len(asked)
        box = nodes.container("", classes=["quiz"])
        for i, question in enumerate(asked, start + 1):
            box += self.question(question, f"quiz-{i}")
        return [box]

    def question(self, question: Question, name: str) -> nodes.container:
        box = nodes.container("", classes=["quiz-question"])
        box += nodes.container("", *self.parse_text_to_nodes(question.ask), ids=[name], classes=["quiz-ask"])
        if question.options:
            box += _raw(f'<div role="radiogroup" aria-labelledby="{name}" data-answer="{question.answer}">')
            for i, option in enumerate(question.options, 1):
                box += _raw(f'<label><input type="radio" name="{name}" value="{i}" autocomplete="off"><span>')
                for block in self.parse_text_to_nodes(option):
                    box += nodes.inline("", "", *block.children)
                box += _raw("</span></label>")
            box += _raw('</div><p class="quiz-said" role="status"></p>')
        label = html.escape("The answer" if question.options else "An answer")
        box += _raw(f'<details class="quiz-why"><summary>{label}</summary>')
        if question.options:
            right = self.parse_text_to_nodes(f"**{question.options[question.answer - 1]}.** {question.why}")
        else:
            right = self.parse_text_to_nodes(question.why)
        box += right
        box += _raw("</details>")
        return box


def _raw(text: str) -> nodes.raw:
    return nodes.raw("", text, format="html")


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("quiz", Quiz)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
