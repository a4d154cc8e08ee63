"""The compression explorer: eight gradients a worker, encoded, decoded, and what error feedback carries over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddplab.figures.base import Figure, still_svg

METHODS = ("fp16", "int8", "1-bit", "top-k")
MOST_WORKERS, MOST_VALUES, MOST_STEPS = 4, 16, 200


@dataclass(frozen=True)
class Message:
    """One worker's values as they travel.

    codes: what is written for each value: fp16's 16 bits as a number, an int8, a bit (1 is plus), or a flag (1 is
    sent).  scale: what codes are multiplied with; 1.0 where there is none.  decoded: float64, what the receiver reads.
    nbytes: on the wire: codes packed, with a 4-byte scale for int8 and 1-bit; 4 + 4 bytes of value and index for top-k.
    """

    codes: np.ndarray
    scale: float
    decoded: np.ndarray
    nbytes: int


def encode(values: Sequence[float] | np.ndarray, method: str, k: int = 2) -> Message:
    """`values`, one-dimensional, encoded by "fp16", "int8" (127 is the largest magnitude), "1-bit" (sign and mean
    magnitude; zero counts as plus) or "top-k" (the k largest magnitudes; of equal ones the first). ValueError for
    another method or a value that is not finite.
    """
    x = np.asarray(values, dtype=np.float64)
    if method not in METHODS:
        raise ValueError(f"method is {', '.join(METHODS)}, not {method!r}")
    if x.ndim != 1 or not x.size:
        raise ValueError(f"values are a list of at least one number, not of shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("only finite values can be encoded")
    if method == "fp16":
        with np.errstate(over="ignore"):
            half = x.astype(np.float16)
        return Message(half.view(np.uint16).astype(int), 1.0, half.astype(np.float64), 2 * x.size)
    if method == "int8":
        scale = float(np.abs(x).max()) / 127 or 1.0
        codes = np.rint(x / scale).astype(int)
        return Message(codes, scale, codes * scale, x.size + 4)
    if method == "1-bit":
        bits, scale = (x >= 0).astype(int), float(np.abs(x).cumsum()[-1]) / x.size
        return Message(bits, scale, np.where(bits == 1, scale, -scale), -(-x.size // 8) + 4)
    flags = np.zeros(x.size, dtype=int)
    flags[np.argsort(-np.abs(x), kind="stable")[:k]] = 1
    return Message(flags, 1.0, np.where(flags == 1, x, 0.0), 8 * int(flags.sum()))


@dataclass(frozen=True)
class Walk:
    """Training steps in which workers send encoded gradients; arrays over (step, worker, value) unless said otherwise.

    corrected: gradient plus what was carried over.  residual: what each step leaves behind (with feedback it is carried
    over, without it is lost).  sent: the workers' mean of what was decoded, (step, value).  error: of the running mean
    of what was sent against the gradients' own running mean, in L2 norm over that of the latter, (step,).
    """

    corrected: np.ndarray
    messages: list[list[Message]]
    residual: np.ndarray
    sent: np.ndarray
    error: np.ndarray


def walk(gradients: np.ndarray, method: str, feedback: bool = True, k: int = 2) -> Walk:
    """Encode `gradients`, (step, worker, value), step by step."""
    gradients = np.asarray(gradients, dtype=np.float64)
    carried, corrected, messages, residual = np.zeros(gradients.shape[1:]), [], [], []
    for gradient in gradients:
        whole = gradient + carried
        row = [encode(one, method, k) for one in whole]
        left = whole - np.stack([m.decoded for m in row])
        carried = left if feedback else np.zeros_like(left)
        corrected.append(whole), messages.append(row), residual.append(left)
    sent = np.stack([[m.decoded for m in row] for row in messages]).mean(axis=1)
    true = gradients.mean(axis=1).cumsum(axis=0)
    off = np.linalg.norm(sent.cumsum(axis=0) - true, axis=1)
    size = np.linalg.norm(true, axis=1)
    error = np.divide(off, size, out=np.zeros_like(off), where=size > 0)
    return Walk(np.stack(corrected), messages, np.stack(residual), sent, error)


def example_gradients(
    workers: int = 4, values: int = 8, steps: int = 60, noise: float = 0.5, seed: int = 0
) -> np.ndarray:
    """Gradients as training has them: one direction for all, large and small entries, and noise of each worker's own.

    Shape (steps, workers, values), float64, rounded to 3 digits after the point.
    """
    draw = np.random.default_rng(seed)
    direction = draw.normal(size=values) * np.geomspace(1.0, 0.05, values)[draw.permutation(values)]
    noisy = direction + noise * np.abs(direction).mean() * draw.normal(size=(steps, workers, values))
    return noisy.round(3)


class CompressionFigure(Figure):
    """Values, codes, decoded values and residual of one worker at one step; and how far the sum of all steps is off.

    gradients: (steps, workers, values): up to 200 steps, 4 workers, 16 values; None takes `example_gradients()`. The
        reader steps through training and chooses the method, error feedback, the worker and, for top-k, k. The figure
        encodes by itself, as `walk` does.
    method: "fp16", "int8", "1-bit" or "top-k".  feedback: error feedback on or off.
    k: entries sent by top-k; None means 2 of them, or all if there are fewer.
    step: where it opens, from 0.  Raises ValueError for what cannot be shown.
    """

    module = "compression.js"

    def __init__(
        self,
        gradients: np.ndarray | None = None,
        *,
        method: str = "1-bit",
        feedback: bool = True,
        k: int | None = None,
        step: int = 0,
        caption: str = "",
    ) -> None:
        g = example_gradients() if gradients is None else np.asarray(gradients, dtype=np.float64)
        if g.ndim != 3 or not g.size or g.shape[1] > MOST_WORKERS or g.shape[2] > MOST_VALUES or len(g) > MOST_STEPS:
            raise ValueError(
                f"gradients are (steps, workers, values), at least 1 each and at most {MOST_STEPS}, {MOST_WORKERS} and "
                f"{MOST_VALUES}, not {g.shape}"
            )
        if not (np.isfinite(g).all() and np.abs(g).max() < 65504 / 2):
            raise ValueError("gradients must be finite and below 32752, so that fp16 holds them with their residual")
        if method not in METHODS:
            raise ValueError(f"method is {', '.join(METHODS)}, not {method!r}")
        k = min(2, g.shape[2]) if k is None else k
        for name, value, least, most in (("k", k, 1, g.shape[2]), ("step", step, 0, len(g) - 1)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} must be a whole number from {least} to {most}, not {value!r}")
        if not isinstance(feedback, bool):
            raise ValueError(f"feedback is True or False, not {feedback!r}")
        self.gradients = g
        super().__init__(caption, gradients=g.tolist(), method=method, feedback=feedback, k=k, step=step, worker=0)

    @property
    def walk(self) -> Walk:
        """All steps with the opening settings."""
        return walk(self.gradients, self.state["method"], self.state["feedback"], self.state["k"])

    def text(self) -> str:
        """The opening state in words."""
        s, w = self.state, self.walk
        message = w.messages[s["step"]][0]
        return (
            f"{s['method']}, error feedback {'on' if s['feedback'] else 'off'}, step {s['step'] + 1}: worker 1 sends "
            f"{message.nbytes} bytes instead of {4 * self.gradients.shape[2]}. After {s['step'] + 1} steps the sum of "
            f"what was sent is {w.error[s['step']]:.1%} off the sum of the gradients."
        )

    def svg(self) -> str:
        """The opening state: bars of the gradient, what was decoded and what is left, for worker 1."""
        s, w, values = self.state, self.walk, self.gradients.shape[2]
        step, message = s["step"], w.messages[s["step"]][0]
        rows = {
            "gradient + carried": w.corrected[step, 0],
            "decoded": message.decoded,
            "residual": w.residual[step, 0],
        }
        wide, left, high = 50.0, 130.0, 66.0
        top = max(float(np.abs(row).max()) for row in rows.values()) or 1.0
        parts = [f'<text x="10" y="18" font-size="11">{self.text()}</text>']
        for r, (name, row) in enumerate(rows.items()):
            middle = 30 + high * r + high / 2
            parts.append(f'<text x="10" y="{middle + 4:g}">{name}</text>')
            parts.append(f'<path d="M{left} {middle:g}h{wide * values:g}" stroke="#999"/>')
            for i, value in enumerate(row):
                height = abs(value) / top * (high / 2 - 14)
                x, y = left + wide * i + 8, middle - height if value >= 0 else middle
                parts.append(
                    f'<rect x="{x:g}" y="{y:.1f}" width="{wide - 16:g}" height="{height:.1f}" fill="#3b7ddd"/>'
                )
                beside = middle - height - 3 if value >= 0 else middle + height + 11
                at = f'x="{x + wide / 2 - 8:g}" y="{beside:.1f}"'
                parts.append(f'<text {at} font-size="10" text-anchor="middle">{value:.3g}</text>')
        return still_svg(max(720, left + wide * values + 10), 30 + high * 3 + 6, "".join(parts))
