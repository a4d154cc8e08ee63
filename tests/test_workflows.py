"""CI's own files: they follow GitHub's schema, and what they name exists."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
OURS = {"_build/executed", "_build/failed", "_build/html", "_build/report.md", "_build/links.md", "labs/results"}


def test_workflows_follow_the_schema():
    assert {path.stem for path in WORKFLOWS} == {"test", "gpu", "pages", "weekly"}
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request):
    return yaml.safe_load(request.param.read_text())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_jobs_that_are_needed_and_matrix_keys_that_are_used_exist(workflow):
    """What the schema does not see."""
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= workflow["jobs"].keys()
        used = set(re.findall(r"matrix\.(\w+)", yaml.safe_dump(job)))
        assert used <= job.get("strategy", {}).get("matrix", {}).keys()
        assert "timeout-minutes" in job or "needs" in job


def test_inputs_outputs_and_variables_that_are_used_exist(workflow):
    text = yaml.safe_dump(workflow["jobs"])
    on = workflow[True]  # YAML 1.1 reads the key `on` as a truth
    declared = set((on.get("workflow_dispatch") or {}).get("inputs", {})) if isinstance(on, dict) else set()
    assert set(re.findall(r"inputs\.(\w+)", text)) == declared
    named = {step["id"] for step in steps(workflow) if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.outputs", text)) <= named
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            for name in set(re.findall(r"\$\{?([A-Z_]+)", step.get("run", ""))):
                assert name in job.get("env", {}) or name.startswith("GITHUB_"), name


def test_scripts_targets_and_artifacts_exist(workflow):
    for step in steps(workflow):
        for script in re.findall(r"\bbash (\S+)", step.get("run", "")):
            assert os.path.isfile(ROOT / script), script
            assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
        for target in re.findall(r"\bmake (\S+)", step.get("run", "")):
            assert target in TARGETS, target
        if "artifact" in step.get("uses", ""):
            kept = set(str(step.get("with", {}).get("path", "")).split())
            assert kept <= OURS, kept - OURS


def test_every_run_of_notebooks_leaves_its_report():
    for path in WORKFLOWS:
        runs = " ".join(step.get("run", "") for step in steps(yaml.safe_load(path.read_text())))
        if re.search(r"make (test|book)|\.ci/run", runs):
            assert 'cat _build/report.md >> "$GITHUB_STEP_SUMMARY"' in runs, path.name


def test_ci_runs_what_a_person_runs():
    assert "exec make test" in (ROOT / ".ci/run").read_text()
    gpu = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())
    runs = [step.get("run", "") for step in steps(gpu)]
    assert 'make test DEVICE=cuda RANKS="$RANKS" QUICK="$QUICK"' in runs
    assert gpu["jobs"]["nccl"]["env"]["RANKS"].endswith("'auto' }}")
