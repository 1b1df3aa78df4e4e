"""Images and charts are of this version, and of the vLLM that pyproject.toml pins."""

from __future__ import annotations

import re
import tomllib

import yaml

from support.deploy import compose
from support.deploy.chart import CHART, LEAST, pods, render
from support.packages.wheel import ROOT
from tracegrad.version import VERSION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINE = (ROOT / "deploy" / "engine.Dockerfile").read_text(encoding="utf-8")
OURS = {"tracegrad", "tracegrad-engine", "tracegrad-engine-cpu", "tracegrad-trainer"}


def test_the_engines_image_has_the_vllm_that_is_pinned() -> None:
    pin = PROJECT["optional-dependencies"]["vllm"][0]
    assert f"ARG VLLM_IMAGE=vllm/vllm-openai:v{pin.removeprefix('vllm==')}\n" in ENGINE


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_our_images_have_this_version_and_others_a_version() -> None:
    images = {each["image"] for each in compose.services().values()}
    images |= {each["image"] for each in compose.services(compose.CPU_FILE).values()}
    of_chart = {pod["spec"]["containers"][0]["image"] for pod in pods(render(LEAST))}
    for image in images | of_chart | set(re.findall(r"-t (tracegrad-\S+)", ENGINE)):
        name, _, tag = image.partition(":")
        assert tag == VERSION if name in OURS else re.match(r"\d", tag), image
    assert {image.partition(":")[0] for image in images} >= OURS


def test_compose_and_chart_take_the_same_images_of_others() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["images"]
    services = compose.services()
    for name in ("haproxy", "postgres"):
        assert services[name]["image"] == f"{values[name]['repository']}:{values[name]['tag']}"


def test_what_a_dockerfile_copies_is_in_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    kept = [line.removeprefix("!").rstrip("/") for line in ignored if line.startswith("!")]
    for dockerfile in (ROOT / "Dockerfile", ROOT / "deploy" / "engine.Dockerfile"):
        copied = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile.read_text(), re.M)
        assert copied
        for path in " ".join(copied).split():
            assert path.rstrip("/") in kept, path
            assert (ROOT / path).exists()
