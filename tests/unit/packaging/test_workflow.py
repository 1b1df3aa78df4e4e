"""The workflow that publishes: what it uses is pinned, and it trusts no more than it must."""

from __future__ import annotations

import re
from typing import Any

import yaml

from support.packages import pythons
from support.packages.wheel import ROOT

TEXT = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]


def test_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (.*)", TEXT)
    assert used
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each


def test_only_the_job_that_publishes_may_ask_for_an_identity() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    asking = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert asking == {"publish": {"id-token": "write"}}
    assert "secrets." not in TEXT


def test_a_tag_is_published_after_every_other_job() -> None:
    publish = JOBS["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/')"
    assert set(publish["needs"]) == set(JOBS) - {"publish"}
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ], "nothing is built or run where the index's trust is"


def test_the_wheel_is_tried_on_every_python() -> None:
    (setup,) = (
        step["with"]["python-version"]
        for step in JOBS["packages"]["steps"]
        if step.get("uses", "").startswith("actions/setup-python@")
    )
    assert set(setup.split()) == set(pythons.SUPPORTED)
    assert set(JOBS["test"]["strategy"]["matrix"]["python"]) <= set(pythons.SUPPORTED)


def test_it_runs_what_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text()
    run = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    targets = [line.split()[-1] for line in run if line.startswith("make ")]
    assert len(targets) == 4
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
