"""docs/deploy.md against what it speaks of."""

from __future__ import annotations

import re

import yaml

from support.deploy import chart, compose
from support.deploy.chart import render
from support.docs.blocks import DOCS, blocks_of

PAGE = (DOCS / "deploy.md").read_text(encoding="utf-8")


def test_the_values_that_it_shows_can_be_installed() -> None:
    [values] = re.findall(r"<!-- test: values -->\n```yaml\n(.*?)```", PAGE, re.S)
    given = yaml.safe_load(values)
    assert render(given)
    assert chart.findings(given) == []


def test_a_command_says_why_no_test_runs_it() -> None:
    commands = [block for block in blocks_of("deploy.md") if block.language == "sh"]
    assert commands
    assert all(block.not_run for block in commands)


def test_it_has_as_many_proxies_as_the_chart_takes() -> None:
    schema = yaml.safe_load((chart.CHART / "values.schema.json").read_text())
    most = schema["properties"]["proxy"]["properties"]["replicas"]["maximum"]
    assert f"`PROXY_0` to `PROXY_{most - 1}`" in PAGE
    assert f"| 2 to {most} |" in PAGE


def test_the_networks_name_is_composes() -> None:
    project, networks = compose.load()["name"], compose.load()["networks"]
    for named in re.findall(r"`(tracegrad_\w+)`", PAGE):
        assert named.removeprefix(f"{project}_") in networks
