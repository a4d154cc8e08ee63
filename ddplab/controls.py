"""Controls for a measurement in a live notebook: choose values, press a button, see what came out beside earlier runs.

    dl.controls(measure, ranks=[2, 4, 8], link=["1gbit", "10gbit"])

Nothing runs before the reader presses. Whatever goes wrong in a run becomes a sentence beside the button. On a page
there is no kernel, and the executed notebook keeps no widget.
"""

from __future__ import annotations

import contextlib
import html
import inspect
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets
import pandas as pd
from IPython.display import clear_output, display

from ddplab._arguments import shown

_WIDE = widgets.Layout(width="24em")
_STYLE = {"description_width": "8em"}


@dataclass(frozen=True)
class Run:
    """A finished measurement: `values` by keyword, the `result` that the function returned, and `seconds` it took."""

    values: dict[str, Any]
    result: Any
    seconds: float

    @property
    def row(self) -> dict[str, Any]:
        """Values and result as one row of a table; a result that is no dictionary stands under "result"."""
        return self.values | (self.result if isinstance(self.result, dict) else {"result": self.result})


class Controls(widgets.VBox):
    """Made by `controls`. boxes: the control of each keyword. button, status, screen: widgets. runs: list of `Run`."""

    def __init__(
        self, measure: Callable[..., Any], show: Callable[[list[Run]], Any] | None, boxes: dict[str, widgets.Widget]
    ):
        self.measure, self.show, self.boxes, self.runs = measure, show, boxes, []
        self.button = widgets.Button(description="measure", button_style="primary", tooltip="run the measurement")
        self.clock, self.status, self.screen = widgets.Label(), widgets.HTML(), widgets.Output()
        self.button.on_click(self._press)
        for box in boxes.values():
            box.observe(lambda _: self._say(f"will run: {self.call}"), "value")
        self._say(f"will run: {self.call}")
        rows = [*boxes.values(), widgets.HBox([self.button, self.status, self.clock]), self.screen]
        super().__init__(rows)

    @property
    def values(self) -> dict[str, Any]:
        """What the controls say now."""
        return {name: box.value for name, box in self.boxes.items()}

    @property
    def call(self) -> str:
        """The measurement as one would type it."""
        name = getattr(self.measure, "__name__", "measure")
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in self.values.items())})"

    def _say(self, text: str, role: str = "status") -> None:
        self.status.value = f'<span role="{role}">{html.escape(text)}</span>'

    def _press(self, _: widgets.Button) -> None:
        """The call runs here, in the kernel's main thread; only the clock has a thread of its own."""
        self.button.disabled, call, start = True, self.call, time.monotonic()
        said = io.StringIO()
        try:
            self._say(f"running {call}")
            with self._ticking(start), self.screen:
                try:
                    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                        values = self.values
                        run = Run(values, self.measure(**values), time.monotonic() - start)
                    self._draw([*self.runs, run], said.getvalue())
                    self.runs.append(run)
                    self._say(f"run {len(self.runs)}: {call} took {run.seconds:.1f} s")
                except BaseException as error:  # an Output would print the traceback, through our insides, too
                    self._say(_sentence(error, time.monotonic() - start), role="alert")
        finally:
            self.button.disabled = False

    @contextlib.contextmanager
    def _ticking(self, start: float) -> Iterator[None]:
        done = threading.Event()

        def tick() -> None:
            while not done.wait(1):
                self.clock.value = f"{time.monotonic() - start:.0f} s"

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.clock.value = ""

    def _draw(self, runs: list[Run], said: str) -> None:
        """Replace what is on the screen; figures that `show` opened are shown once, and closed."""
        before = _figures()
        try:
            clear_output(wait=True)  # only when something comes instead: the screen does not flicker
            if self.show is not None:
                drawn = self.show(runs)
            elif isinstance(runs[-1].result, dict):
                drawn = pd.DataFrame([run.row for run in runs])
            else:
                drawn = runs[-1].result
            things = list(drawn) if isinstance(drawn, list | tuple) else [drawn]
            things = [getattr(thing, "figure", None) or thing if _is_axes(thing) else thing for thing in things]
            opened = [figure for number, figure in _figures().items() if number not in before]
            for thing in [*things, *(figure for figure in opened if not any(figure is t for t in things))]:
                if thing is not None:
                    display(thing)
            if said:
                print(said, end="")
        finally:
            for number in _figures().keys() - before.keys():
                sys.modules["matplotlib.pyplot"].close(number)


def controls(measure: Callable[..., Any], show: Callable[[list[Run]], Any] | None = None, **choices: Any) -> Controls:
    """A control for each keyword of a measurement, a button that runs it, and the results of all runs so far.

    measure: is called with one value of each keyword, in the notebook's own process. A dictionary that it returns is a
        row of a table that grows with every run; anything else is displayed as it is.
    show: gets all runs, a list with `.values`, `.result`, `.seconds` and `.row`, the latest last. The figure or
        table that it returns, or a tuple of them, is displayed instead.
    choices: for each keyword of `measure` a list (numbers make a slider, other things a menu), a range (a slider of
        whole numbers), a tuple (low, high) or (low, high, step) (a slider), a dictionary of names and values (a menu),
        or True or False (a box to tick). A control begins at the default of `measure` where that is among them.

    Nothing runs before the button is pressed. An error in a run, Ctrl-C too, is shown beside the button, and the
    button works again. Returns the widget. TypeError or ValueError for arguments that make no sense.
    """
    if not callable(measure):
        raise TypeError(f"controls takes a function that measures, not {shown(measure)}")
    if show is not None and not callable(show):
        raise TypeError(f"show is a function that draws a list of runs, not {shown(show)}")
    if not choices:
        raise ValueError("controls needs something to change: a list or range for a keyword, such as ranks=[2, 4]")
    name = getattr(measure, "__name__", "measure")
    signature = inspect.signature(measure)
    try:
        signature.bind(**choices)
    except TypeError as error:
        raise TypeError(f"these controls do not fit {name}{signature}: {error}") from None
    boxes = {}
    for keyword, choice in choices.items():
        parameter = signature.parameters.get(keyword)
        boxes[keyword] = _box(keyword, choice, parameter.default if parameter else None)
    return Controls(measure, show, boxes)


def _box(name: str, choice: Any, default: Any) -> widgets.Widget:
    label = {"description": name.replace("_", " "), "style": _STYLE, "layout": _WIDE}
    if isinstance(choice, bool):
        return widgets.Checkbox(value=choice, indent=True, **label)
    if isinstance(choice, list | dict | range) and not len(choice):
        raise ValueError(f"{name} has no value to choose from")
    if isinstance(choice, range):
        low, high = sorted((choice[0], choice[-1]))
        value = default if _number(default) and default in choice else choice[0]
        return widgets.IntSlider(value=value, min=low, max=high, step=abs(choice.step), **label)
    if isinstance(choice, tuple):
        if not (len(choice) in (2, 3) and all(map(_number, choice)) and choice[0] < choice[1]):
            raise ValueError(f"{name} as a tuple is (low, high) or (low, high, step), not {shown(choice)}")
        kind = widgets.IntSlider if all(isinstance(x, int) for x in choice) else widgets.FloatSlider
        low, high, *step = choice
        if step and step[0] <= 0:
            raise ValueError(f"the step of {name} is above 0, not {step[0]}")
        value = default if _number(default) and low <= default <= high else low
        return kind(value=value, min=low, max=high, **({"step": step[0]} if step else {}), **label)
    if not isinstance(choice, list | dict):
        raise TypeError(f"{name} is a list, a range, a tuple, a dictionary, True or False, not {shown(choice)}")
    found = list(choice.values()) if isinstance(choice, dict) else choice
    options = list(choice.items()) if isinstance(choice, dict) else [(str(value), value) for value in choice]
    kind = widgets.SelectionSlider if isinstance(choice, list) and all(map(_number, choice)) else widgets.Dropdown
    known = [value for value in found if type(value) is type(default) and value == default]
    return kind(options=options, value=known[0] if known else found[0], **label)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sentence(error: BaseException, seconds: float) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"stopped after {seconds:.1f} s"
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if not text:
        return f"{kind}, without a word"
    plain = isinstance(error, ValueError | NotImplementedError) or type(error).__module__.startswith("ddplab")
    return text if plain else f"{kind}: {text}"


def _figures() -> dict[int, Any]:
    """Open figures of pyplot, by number; none where nobody has loaded it."""
    plt = sys.modules.get("matplotlib.pyplot")
    return {number: plt.figure(number) for number in plt.get_fignums()} if plt else {}


def _is_axes(thing: Any) -> bool:
    return hasattr(thing, "figure") and hasattr(thing, "get_xlim")
