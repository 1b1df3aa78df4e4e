"""The chart of deploy/helm, rendered and linted by Helm's own code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import helm_python
import yaml

from support.packages.wheel import ROOT

CHART = ROOT / "deploy" / "helm" / "tracegrad"
Json = dict[str, Any]

# The least that must be given, and what each of the further values is there for.
LEAST: Json = {"auth": {"existingSecret": "keys"}, "store": {"existingSecret": "database"}}
KEY, CONTROL_KEY, PASSWORD = "a" * 40, "c" * 40, "p" * 40
TRIAL: Json = {
    "auth": {"apiKey": KEY, "controlKey": CONTROL_KEY},
    "store": {"trial": {"enabled": True, "password": PASSWORD}},
}
LARGE: Json = {
    **LEAST,
    "model": "Qwen/Qwen3-8B",
    "settings": {
        "batches": {"groups": 16},
        "optim": {"lr": 1e-6},
        "proxy": {"workers": 4},
        "push": {"drain_s": 5},
        "rewards": {"commands": {"done": "true"}},
    },
    "images": {"pullSecrets": [{"name": "registry"}]},
    "hub": {"existingSecret": "hub"},
    "listen": "::",
    "haproxy": {"replicas": 3, "service": {"type": "LoadBalancer", "port": 80}},
    "proxy": {"replicas": 16, "env": [{"name": "SSL_CERT_FILE", "value": "/ca/ca.pem"}]},
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca", "readOnly": True}],
    "engine": {
        "replicas": 8,
        "gpus": 2,
        "extraArgs": ["--max-num-seqs=512"],
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "trainer": {"nodes": 2, "gpus": 8},
    "workers": {"enabled": True},
    "codeConfigMap": "rewards",
    "state": {"existingClaim": "state"},
    "models": {"storageClassName": "shared", "size": "1Ti"},
    "networkPolicy": {
        "agents": [{"namespaceSelector": {"matchLabels": {"team": "agents"}}}],
        "monitoring": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    },
    "serviceAccount": {"annotations": {"owner": "ml"}},
    "podAnnotations": {"sidecar.istio.io/inject": "false"},
}
CASES = {"least": LEAST, "trial": TRIAL, "large": LARGE}


def render(values: Mapping[str, Any], *, name: str = "run", namespace: str = "ml") -> list[Json]:
    """The objects that an installation makes.

    Raises helm_python.HelmError: the values are wrong.
    """
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        files = chart.render(dict(values), name=name, namespace=namespace)
    return [
        each
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each
    ]


def notes(values: Mapping[str, Any]) -> str:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(dict(values), name="run", namespace="ml")
    return next(text for path, text in files.items() if path.endswith("NOTES.txt"))


def findings(values: Mapping[str, Any]) -> list[str]:
    """What `helm lint --strict` has to say, but for hints."""
    report = helm_python.lint(CHART, dict(values), strict=True)
    messages = [each for each in report["messages"] if each["severity"] > 1]
    return [*report["errors"], *(f"{each['path']}: {each['error']}" for each in messages)]


def of_kind(objects: list[Json], *kinds: str) -> list[Json]:
    return [each for each in objects if each["kind"] in kinds]


def pods(objects: list[Json]) -> Iterator[Json]:
    """Metadata and specification of every pod that would run, by `metadata` and `spec`."""
    for each in objects:
        if each["kind"] == "Pod":
            yield each
        elif "template" in each.get("spec", {}):
            yield each["spec"]["template"]


def part_of(thing: Json) -> str:
    part: str = thing["metadata"]["labels"]["app.kubernetes.io/component"]
    return part


def container(objects: list[Json], part: str) -> Json:
    """That of the pods of a part, which have one."""
    [pod] = [pod for pod in pods(objects) if part_of(pod) == part]
    [found] = pod["spec"]["containers"]
    alone: Json = found
    return alone


def environment(container: Json) -> dict[str, str]:
    """Names and values; of what comes from elsewhere the name alone."""
    return {each["name"]: each.get("value", "") for each in container["env"]}


def config(objects: list[Json], file: str) -> str:
    [text] = [each["data"][file] for each in of_kind(objects, "ConfigMap") if file in each["data"]]
    found: str = text
    return found
