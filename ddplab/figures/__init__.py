"""Figures that the reader drives. `base.py` says how to write one."""

from ddplab.figures.base import Figure
from ddplab.figures.buckets import BucketFigure
from ddplab.figures.compression import CompressionFigure
from ddplab.figures.crossover import CrossoverFigure
from ddplab.figures.headline import HeadlineFigure
from ddplab.figures.linkhealth import LinkFigure
from ddplab.figures.linkloads import LinkLoads
from ddplab.figures.overlap import OverlapFigure
from ddplab.figures.stepper import VARIANTS, RingStepper, Stepper, figure_of
from ddplab.figures.strategies import StrategyFigure
from ddplab.figures.tuning import TuningFigure
from ddplab.figures.windows import WindowFigure

__all__ = [
    "VARIANTS",
    "BucketFigure",
    "CompressionFigure",
    "CrossoverFigure",
    "Figure",
    "HeadlineFigure",
    "LinkFigure",
    "LinkLoads",
    "OverlapFigure",
    "RingStepper",
    "Stepper",
    "StrategyFigure",
    "TuningFigure",
    "WindowFigure",
    "figure_of",
]
