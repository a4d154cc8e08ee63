"""Arguments that make no sense, in the public functions about compression: a sentence of ours, before anything runs."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import ddplab as dl
from ddplab import CheckError
from ddplab._arguments import choice, flag, instance, several, shown

ONE = dl.Compressor("one")
SIGNS, BYTES = dl.SignCodec(), torch.zeros(100, dtype=torch.uint8)
RUNS = pd.DataFrame({"method": [], "baseline": [], "seed": [], "step": [], "loss": [], "wire_B": []})
DIGITS = np.zeros((800, 8, 8)), np.zeros(800, dtype=int)
ROWS = torch.ones(4, 3)

WRONG = {
    # rounding
    "ranks is a number": (lambda: dl.rounding_error(ranks=4), TypeError, "ranks are a list of numbers of ranks.*not 4"),
    "ranks are words": (lambda: dl.rounding_error(ranks="48"), TypeError, "ranks are a list.*not '48'"),
    "no ranks": (lambda: dl.rounding_error(ranks=[]), ValueError, "ranks are a list.*at least one"),
    "half a rank": (lambda: dl.rounding_error(ranks=[2.5]), ValueError, "each of the ranks.*not 2.5"),
    "a true rank": (lambda: dl.rounding_error(ranks=[True]), ValueError, "each of the ranks.*not True"),
    "dtype as text": (lambda: dl.rounding_error(dtypes="fp16"), TypeError, "dtypes is a list of fp16.*not 'fp16'"),
    "dtype as number": (lambda: dl.rounding_error(dtypes=[16]), ValueError, 'each of dtypes is "fp16".*not 16'),
    "dtype as list": (lambda: dl.rounding_error(dtypes=[[]]), ValueError, r"each of dtypes.*not \[\]"),
    "no schedules": (lambda: dl.rounding_error(schedules=None), TypeError, "schedules is a list of ring.*not None"),
    "elements": (lambda: dl.rounding_error(elements="9"), ValueError, "elements must be a whole number.*not '9'"),
    "signal": (lambda: dl.rounding_error(signal=10**400), ValueError, "signal is a number"),
    "seed": (lambda: dl.rounding_error(seed="s"), ValueError, "seed must be a whole number.*not 's'"),
    "sum of lists": (lambda: dl.rounded_sum(dl.ring(1), [[1]]), TypeError, r"values are a tensor.*not \[\[1\]\]"),
    "no schedule": (lambda: dl.rounded_sum("ring", ROWS), TypeError, "a ddplab.Schedule.*not 'ring'"),
    "complex": (lambda: dl.rounded_sum(dl.ring(4), ROWS + 0j), TypeError, "real numbers, not torch.strided, torch.c"),
    # paired runs
    "one value": (lambda: dl.paired(1.0, [1], lower_is_better=True), TypeError, "method is a list of num.*not 1.0"),
    "words": (lambda: dl.paired("12", [1, 2], lower_is_better=True), TypeError, "method is a list.*not '12'"),
    "a word": (lambda: dl.paired([1, "x"], [1, 2], lower_is_better=True), TypeError, "one for each seed: 'x' is none"),
    "a None": (lambda: dl.paired([1, 2], [1, None], lower_is_better=True), TypeError, "baseline.*None is none"),
    "confidence": (
        lambda: dl.paired([1, 2], [1, 2], lower_is_better=True, confidence="x"),
        ValueError,
        "confidence is between 0 and 1, such as 0.95, not 'x'",
    ),
    "direction": (lambda: dl.paired([1, 2], [1, 2], lower_is_better="yes"), TypeError, "lower_is_better is True or"),
    "ratio": (lambda: dl.paired([1, 2], [1, 2], lower_is_better=True, ratio=1), TypeError, "ratio is True or F.*not 1"),
    # convergence
    "seeds": (lambda: dl.converge(*DIGITS, seeds=3), TypeError, r"seeds are whole numbers, such as range\(5\), not 3"),
    "a seed": (lambda: dl.converge(*DIGITS, seeds=["1"]), ValueError, "each of the seeds must be.*not '1'"),
    "methods": (lambda: dl.converge(*DIGITS, methods="fp16"), TypeError, "methods are a list of names.*not 'fp16'"),
    "a method": (lambda: dl.converge(*DIGITS, methods=[[]]), ValueError, r"no method is called \[\]"),
    "hosts": (lambda: dl.converge(*DIGITS, hosts=4), TypeError, "hosts are emulated ones, a ddplab.Hosts.*not 4"),
    "timeout": (
        lambda: dl.converge(*DIGITS, timeout=0),
        ValueError,
        "timeout, in seconds, is a positive number",
    ),
    "device": (lambda: dl.converge(*DIGITS, device="tpu"), ValueError, "device"),
    "ranks": (lambda: dl.converge(*DIGITS, ranks=-1), ValueError, "ranks must be a whole number.*not -1"),
    "pixels": (lambda: dl.converge("x", [1]), TypeError, "pixels and labels are arrays of numbers, not 'x'"),
    "ragged": (lambda: dl.converge([[1], [1, 2]], [1]), TypeError, "pixels and labels are arrays of numbers"),
    "an empty frame": (lambda: dl.verdicts(pd.DataFrame()), ValueError, "this one has no method, baseline, seed"),
    "no rows": (lambda: dl.verdicts(RUNS), ValueError, "runs has no rows"),
    "no frame": (lambda: dl.verdicts([1]), TypeError, r"the DataFrame that ddplab.converge gives, not \[1\]"),
    "metric": (lambda: dl.verdicts(RUNS, ["loss"]), ValueError, r"metric is \"loss\".*not \['loss'\]"),
    # when does compression pay?
    "one compressor": (lambda: dl.crossover(ONE), TypeError, "compressors are a list of ddplab.Compressor"),
    "no link": (lambda: dl.crossover(link=None), ValueError, "Link None is not a rate"),
    "baseline": (lambda: dl.crossover(baseline="fp32"), TypeError, "ddplab.Compressor objects, not 'fp32'"),
    "a true rank count": (lambda: dl.crossover(ranks=True), ValueError, "ranks must be a whole number.*not True"),
    "name": (lambda: dl.Compressor(5), TypeError, "a compressor's name is text, not 5"),
    "routing": (lambda: dl.Compressor("c", routing=None), ValueError, "a compressor's routing is.*not None"),
    "minus ranks": (lambda: ONE.seconds(-4, 1e6, "1gbit"), ValueError, "ranks must be a whole number.*not -4"),
    "0 ranks": (lambda: ONE.bytes_sent(0, 1e6), ValueError, "ranks must be a whole number of at least 1, not 0"),
    "0 ranks wait": (lambda: ONE.latencies(0), ValueError, "ranks must be a whole number of at least 1, not 0"),
    "0 ranks decode": (lambda: ONE.beside_s(0, 1), ValueError, "ranks must be a whole number of at least 1, not 0"),
    "minus bytes": (lambda: ONE.seconds(4, -1e6, "1gbit"), ValueError, "nbytes is a number, 0 or more, not -1000000.0"),
    "no bytes": (lambda: ONE.encoding_s(None), ValueError, "nbytes is a number, 0 or more, not None"),
    "computing": (lambda: ONE.seconds(4, 1, "1gbit", compute_s=-1), ValueError, "compute_s is a number, 0 or more"),
    "overlap": (lambda: ONE.seconds(4, 1, "1gbit", overlap="no"), TypeError, "overlap is True or False, not 'no'"),
    "whose": (lambda: dl.crossover().seconds("fp16"), TypeError, "ddplab.Compressor objects, not 'fp16'"),
    "whose rate": (lambda: dl.crossover().rate_Bps(None), TypeError, "ddplab.Compressor objects, not None"),
    "rate": (lambda: dl.crossover().speedup(ONE, -1), ValueError, "rate_Bps must be a positive number"),
    # a headline
    "before": (lambda: dl.headline(before_s="x"), ValueError, "before_s is a positive number, not 'x'"),
    "runs": (lambda: dl.three_runs(None, 1, 1), ValueError, "noop_s is a positive number, not None"),
    "bits": (lambda: dl.three_runs(1, 3, 2).step_s(-1), ValueError, "bits is a number, 0 or more, not -1"),
    # recipes and codecs
    "recipe": (lambda: dl.Recipe("SGD", None, "."), TypeError, "a recipe's make is a function.*not 'SGD'"),
    "recipe's baseline": (lambda: dl.Recipe(print, 5, "."), TypeError, "baseline is the name of another one.*not 5"),
    "values": (lambda: SIGNS.encode([1.0], BYTES), TypeError, r"a codec encodes a one-dimensional.*not \[1.0\]"),
    "matrix": (lambda: SIGNS.encode(ROWS, BYTES), TypeError, r"a one-dimensional floating tensor, not a Tensor of sh"),
    "room": (
        lambda: SIGNS.encode(ROWS.view(-1), BYTES[:2]),
        ValueError,
        "12 encoded values are a uint8 tensor of 6",
    ),
    "data": (lambda: SIGNS.decode(None, torch.ones(3)), TypeError, "data are a uint8 tensor, not None"),
    "out": (lambda: SIGNS.decode(BYTES, torch.ones(3).half()), TypeError, "into a one-dimensional float32 tensor"),
    "nbytes": (lambda: SIGNS.nbytes(-1), ValueError, "n, the number of values, must be a whole number"),
    "hook's state": (lambda: dl.onebit_hook(None, None), TypeError, "one of ddplab's, such as ddplab.OneBit.*not None"),
    "encoder": (lambda: dl.check_onebit(5), TypeError, "check_onebit takes a function.*not 5"),
    "scale": (lambda: dl.check_onebit(lambda g, r: (g >= 0, None, r)), CheckError, "scale is a number, not None"),
    "NaN as scale": (lambda: dl.check_onebit(lambda g, r: (g >= 0, math.nan, r)), CheckError, "the scale is nan"),
    "routing's bytes": (lambda: dl.check_routing_bytes(None), TypeError, "takes a function of a route.*not None"),
    "no bytes at all": (lambda: dl.check_routing_bytes(lambda *a: None), CheckError, "<lambda> returned None"),
    "NaN bytes": (lambda: dl.check_routing_bytes(lambda *a: math.nan), CheckError, "<lambda> returned nan"),
    "two levels": (lambda: dl.check_two_level(5), TypeError, "a function of a tensor and two groups, not 5"),
    "no hosts": (lambda: dl.check_two_level(print, hosts=0), ValueError, "hosts must be a whole number.*not 0"),
    # without ranks
    "optimizer": (lambda: dl.OneBitAdam(nn.Linear(2, 2), warmup=1), TypeError, "model.named_parameters.., not Linear"),
    "no optimizer": (lambda: dl.OneBitAdam(5, warmup=1), TypeError, "OneBitAdam takes parameters.*not 5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_sentence_names_the_argument_its_value_and_what_fits(case):
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_truth_values_words_kinds_and_lists():
    assert flag(np.True_, "f") is True and flag(False, "f") is False
    for value in (1, 0.0, "no", None, math.nan, torch.tensor(True)):
        with pytest.raises(TypeError, match="f is True or False, not "):
            flag(value, "f")
    assert choice("b", "c", ("a", "b")) == "b"
    with pytest.raises(ValueError, match='^c is "a", not "?\'?a b'):
        choice("a b", "c", ["a"])
    assert instance(3, (int, str), "i") == 3
    assert several(iter([1, None]), "s") == [1, None]
    for value in ("ab", b"ab", {"a": 1}, None, 3, torch.tensor(1.0), np.array(2)):
        with pytest.raises(TypeError, match="^s are things, not "):
            several(value, "s are things")


def test_long_values_are_described():
    assert shown([1, 2]) == "[1, 2]"
    assert shown(torch.zeros(50, 2)) == "a Tensor of shape (50, 2)"
    assert shown("x" * 500) == "a str" and shown(pd.DataFrame({"a": [1, 2]})) == "a DataFrame of shape (2, 1)"
