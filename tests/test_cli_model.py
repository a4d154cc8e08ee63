"""`ddplab predict --model`: the table against predict_step, the page in a browser, every mistake in one sentence."""

from __future__ import annotations

import json
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ddplab as dl
from ddplab.cli import main

pytestmark = pytest.mark.skipif(find_spec("torchvision") is None, reason="a named model's layers are torchvision's")

LINEAR = """
    import torch

    def plain():
        return torch.nn.Linear(1000, 1000, bias=False)

    def with_inputs():
        return torch.nn.Linear(1000, 1000, bias=False), torch.zeros(16, 1000)

    def number():
        return 3

    def broken():
        raise KeyError("weights")

    def leaves():
        import sys

        sys.exit(0)

    def elsewhere():
        import os

        os.chdir("/")
        raise RuntimeError("no weights\\nin two lines")

    def lazy():
        return torch.nn.LazyLinear(3)

    def wrong_inputs():
        return torch.nn.Linear(3, 3), torch.zeros(2, 5)

    class Talkative(torch.nn.Linear):
        def forward(self, x):
            print("working ...")
            return super().forward(x)

    def talks():
        print("building ...")
        return Talkative(1000, 1000, bias=False), torch.zeros(16, 1000)

    def frozen():
        return torch.nn.Linear(2, 2).requires_grad_(False)
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a module of the user's."""
    (tmp_path / "mymodels.py").write_text(textwrap.dedent(LINEAR))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mymodels", raising=False)
    return tmp_path


def rows_of(capsys: Any, line: str) -> dict:
    assert main(["predict", "--json", *line.split()]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_resnet50_from_1_to_1024_ranks(capsys: Any) -> None:
    found = rows_of(capsys, "--model resnet50 --ranks 8 --link 10gbit --jitter 0")
    assert found["basis"] == "predicted"
    assert [row["ranks"] for row in found["rows"]] == [2**k for k in range(11)]
    profile = dl.assumed_profile("resnet50")
    assert profile.nbytes == 4 * 25_557_032
    for row in found["rows"]:
        said = dl.predict_step(profile, row["ranks"], "10gbit")
        assert row["step_ms"] == pytest.approx(said.step_s * 1e3)
        assert row["exposed_ms"] == pytest.approx(said.exposed_s * 1e3)
        assert row["samples_per_s"] == pytest.approx(row["ranks"] * 32 / said.step_s)
        assert row["low_ms"] == row["high_ms"] == row["step_ms"]
    assert found["rows"][0]["exposed_ms"] == 0 and found["rows"][0]["efficiency_pct"] == pytest.approx(100)
    assert any("assumed 10 TFLOP/s" in line for line in found["assumptions"])
    best, _ = dl.best_bucket_cap(profile, ranks=8, link="10gbit")
    assert found["best_bucket_cap_mb"] == best


def test_options_reach_the_prediction(capsys: Any) -> None:
    options = "--compute-ms 100 --bucket-cap-mb 5 --compression fp16 --slowdown 1.2 --jitter 5 --ranks 6"
    found = rows_of(capsys, f"--model resnet18 --link 1gbit {options}")
    profile = dl.assumed_profile("resnet18", compute_s=0.1)
    said = dl.predict_step(profile, 6, "1gbit", 5, "fp16", slowdown=1.2, jitter=0.05)
    (row,) = [row for row in found["rows"] if row["ranks"] == 6]
    assert (row["step_ms"], row["low_ms"], row["high_ms"]) == pytest.approx(
        (said.step_s * 1e3, said.band_s[0] * 1e3, said.band_s[1] * 1e3)
    )
    assert row["buckets"] == len(said.buckets)


def test_ranks_that_share_hosts(capsys: Any) -> None:
    found = rows_of(
        capsys, "--model resnet18 --ranks 16 --ranks-per-host 8 --inner-link 300GB/s --link 10gbit --jitter 0"
    )
    profile = dl.assumed_profile("resnet18")
    by_ranks = {row["ranks"]: row["step_ms"] for row in found["rows"]}
    one_host = dl.Topology(1, 8, dl.Link.parse("10gbit"), dl.Link.parse("300GB/s"))
    two_hosts = dl.Topology(2, 8, dl.Link.parse("10gbit"), dl.Link.parse("300GB/s"))
    assert by_ranks[8] == pytest.approx(dl.predict_step(profile, topology=one_host).step_s * 1e3)
    assert by_ranks[16] == pytest.approx(dl.predict_step(profile, topology=two_hosts).step_s * 1e3)


def test_the_table_says_what_it_assumed(capsys: Any) -> None:
    assert main("predict --model resnet50 --ranks 8 --link 10gbit".split()) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    text = " ".join(text.split())
    assert text.startswith("Predicted, not measured")
    for words in ("Assumed:", "10 TFLOP/s", "GB/s payload", "50 us a step", "varies by 3%", "1024"):
        assert words in text


def test_a_model_of_the_users_own_is_trusted_code_and_it_says_so(there: Path, capsys: Any) -> None:
    assert main("predict --model mymodels:with_inputs --tflops 0.001".split()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "mymodels:with_inputs was imported and run: trusted code" in text
    found = rows_of(capsys, "--model mymodels:with_inputs --tflops 0.001 --jitter 0")
    assert found["rows"][0]["step_ms"] == pytest.approx(3 * 2 * 16 * 1e6 / 1e9 * 1e3)
    assert found["rows"][0]["samples_per_s"] == pytest.approx(16 / 0.096)
    found = rows_of(capsys, "--model mymodels:plain --compute-ms 60 --jitter 0")
    assert found["rows"][0]["step_ms"] == pytest.approx(60) and found["rows"][0]["samples_per_s"] is None
    found = rows_of(capsys, "--model mymodels:talks --tflops 0.001 --jitter 0")  # its prints are not in the JSON
    assert found["rows"][0]["step_ms"] == pytest.approx(96)
    assert main(["predict", "--help"]) == 0
    assert "only code that you trust" in " ".join(capsys.readouterr().out.split())


def test_the_page_is_whole_and_alive(there: Path, browser: Any, capsys: Any) -> None:
    assert main("predict --model resnet18 --ranks 8 --link 10gbit --html page.html".split()) == 0
    assert "Wrote page.html" in capsys.readouterr().out
    assert sorted(p.name for p in there.iterdir() if p.suffix == ".html") == ["page.html"]
    page = browser.new_page(viewport={"width": 390, "height": 800})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if "page.html" not in request.url else None)
    page.goto((there / "page.html").as_uri())
    before = page.locator("[aria-live]").text_content()
    page.get_by_label("Ranks", exact=True).press("End")
    assert page.locator("[aria-live]").text_content() != before
    assert page.locator("svg.chart circle").count() == 11
    assert page.locator("tr.chosen td").first.text_content() == "8"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert [url for url in problems if not url.startswith("data:")] == []
    page.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model resnet5O", "did you mean resnet50"),
        ("--model nosuch:thing", "ModuleNotFoundError: No module named 'nosuch'"),
        ("--model mymodels:nothing", "AttributeError"),
        ("--model mymodels:number", "returned int; it must return a torch module"),
        ("--model mymodels:broken", "KeyError: 'weights'"),
        ("--model mymodels:frozen --compute-ms 1", "requires a gradient"),
        ("--model mymodels:plain", "use --compute-ms"),
        ("--model mymodels:plain --batch 3", "example inputs of module:factory"),
        ("--model resnet18 --size 1M", "--size prices one all-reduce, not --model"),
        ("--model resnet18 --schedule ring", "--schedule prices one all-reduce"),
        ("--batch 3", "--batch needs --model"),
        ("--html x.html", "--html needs --model"),
        ("--model resnet18 --jitter -1", "--jitter: '-1' is not a jitter in percent"),
        ("--model resnet18 --jitter 60", "--jitter: '60' is not a jitter in percent; give a number, from 0 to 50"),
        ("--model resnet18 --tflops 1e300", "takes no time at all"),
        ("--model= --ranks 4", "--model is empty"),
        ("--model mymodels:leaves", "mymodels:leaves failed: SystemExit: 0"),
        ("--model mymodels:elsewhere", "mymodels:elsewhere failed: RuntimeError: no weights in two lines"),
        ("--model mymodels:lazy --compute-ms 5", "uninitialized parameter"),
        ("--model mymodels:wrong_inputs", "without data its forward fails: RuntimeError"),
        ("--model mymodels.py:plain", "is a file; name the module, from its folder: --model mymodels:plain"),
        ("--model ./mymodels:plain", "--model mymodels:plain"),
        ("--model resnet18 --batch 1.5", "--batch: '1.5' is not a count"),
        ("--model resnet18 --bucket-cap-mb 0", "--bucket-cap-mb: '0' is not a size in MiB"),
        ("--model resnet18 --slowdown 0.5", "--slowdown: '0.5' is not a factor"),
        ("--model resnet18 --tflops nan", "--tflops: 'nan' is not a speed in TFLOP/s"),
        ("--model resnet18 --tflops 0", "--tflops: '0' is not a speed in TFLOP/s"),
        ("--model resnet18 --compression zip", "unknown compression 'zip'"),
        ("--model resnet18 --html nowhere/page.html", "cannot write 'nowhere/page.html': there is no folder 'nowhere'"),
        ("--model resnet18 --html .", "cannot write '.'"),
        ("--model resnet18 --ranks 12 --ranks-per-host 8", "do not fill hosts"),
    ],
)
def test_mistakes_are_one_sentence(there: Path, capsys: Any, line: str, words: str) -> None:
    assert main(["predict", *line.split()]) in (1, 2)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and "Traceback" not in error
    assert [p.name for p in there.iterdir() if p.suffix == ".html" or p.name.startswith(".ddplab-")] == []
