"""A recorded table comes back as it was, with where it was made; anything else is refused in one sentence."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from conftest import ROOT

from ddplab.results import load_results, save_results


def test_a_table_survives_with_its_provenance(tmp_path):
    table = pd.DataFrame({"ranks": [2, 4], "algorithm": ["ring", "star"], "time_us": [1.5, 2.25], "sent_B": [10, 20]})
    save_results(tmp_path / "new" / "grid.json", table, link="1gbit")
    back, about = load_results(tmp_path / "new" / "grid.json")
    pd.testing.assert_frame_equal(back, table)
    assert about["link"] == "1gbit" and torch.__version__.split("+")[0] in about["versions"]
    assert about["date"].endswith("UTC") and "CPUs" in about["machine"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["grid.json"]


def test_missing_values_become_null_not_nan(tmp_path):
    save_results(tmp_path / "x.json", pd.DataFrame({"busbw_pct": [float("nan"), 97.0]}))
    assert json.loads((tmp_path / "x.json").read_text())["rows"][0] == {"busbw_pct": None}


def test_an_absent_file_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="QUICK=False"):
        load_results(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', "not json", '{"rows": 3, "about": {}}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="no recorded result"):
        load_results(tmp_path / "x.json")


def test_every_recorded_result_names_machine_versions_date_and_a_command_that_exists():
    files = sorted((ROOT / "labs/results").glob("*.json"))
    assert len(files) > 10
    for file in files:
        about = json.loads(file.read_text("utf8"))["about"]
        assert {"date", "machine", "versions", "script"} <= about.keys(), file.name
        script = about["script"].split()[0]
        assert script == "make" or (ROOT / script).exists(), f"{file.name}: {script}"
