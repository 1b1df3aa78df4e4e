"""The chart of deploy/helm, rendered by Helm's own code, against Kubernetes' own schemas."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest

from support.deploy import chart, commands
from support.deploy.chart import (
    CASES,
    CONTROL_KEY,
    KEY,
    LARGE,
    LEAST,
    PASSWORD,
    TRIAL,
    Json,
    config,
    container,
    environment,
    of_kind,
    part_of,
    pods,
    render,
)
from support.deploy.haproxy import CONFIG
from support.trainer.prepared_run import save_smallest_model
from tracegrad.proxy.config import ProxySettings
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.launch.workers import wanted_workers

KUBERNETES = "1.28", "1.34"  # the oldest that the chart is for, and a later one
LONGEST_LABEL = 63


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def objects(case: str) -> list[Json]:
    return render(CASES[case])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest_model(tmp_path_factory.mktemp("model"))


def test_helm_finds_nothing_wrong(case: str) -> None:
    assert chart.findings(CASES[case]) == []


def test_helm_finds_what_is_wrong() -> None:
    """The check before this one can fail."""
    assert chart.findings({**LEAST, "proxy": {"replicas": "two"}})


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(objects: list[Json], version: str) -> None:
    assert objects
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_found(objects: list[Json]) -> None:
    """The check before this one can fail."""
    [service] = [each for each in of_kind(objects, "Service") if "haproxy" in part_of(each)]
    wrong = {**service, "spec": {**service["spec"], "prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)


def test_each_object_has_a_name_of_its_own(objects: list[Json]) -> None:
    named = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(named) == len(set(named))


def test_names_stay_short_enough() -> None:
    rendered = render({**TRIAL, "proxy": {"replicas": 16}}, name="r" * 53)
    for each in rendered:
        # A StatefulSet's pods have its name and a number, as a label.
        assert len(f"{each['metadata']['name']}-15") <= LONGEST_LABEL


def test_the_settings_are_what_the_trainer_takes(
    case: str, objects: list[Json], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "tracegrad.toml"
    file.write_text(config(objects, "tracegrad.toml"))
    overrides = [f"model={model}", f"state_dir={tmp_path / 'state'}"]
    settings = load_settings(file, overrides)
    engines, proxies = replicas(objects, "engine"), replicas(objects, "proxy")
    name = "run-tracegrad"
    assert settings.vllm.urls == tuple(
        f"http://{name}-engine-{n}.{name}-engine.ml.svc.cluster.local:8000" for n in range(engines)
    )
    assert settings.push.proxies == tuple(
        f"http://{name}-proxy-{n}.{name}-proxy.ml.svc.cluster.local:4141" for n in range(proxies)
    )
    [port] = [each["port"] for each in one_address(objects)["spec"]["ports"]]
    assert settings.proxy_url == f"http://{name}:{port}"
    assert settings.vllm.max_model_len == 16384
    # The values' own settings are among them, and workers are there where these want them.
    for table, given in CASES[case].get("settings", {}).items():
        if table != "rewards":
            for field, value in given.items():
                assert getattr(getattr(settings, table), field) == value
    deployments = {part_of(each) for each in of_kind(objects, "Deployment")}
    assert bool(wanted_workers(settings)) == ("workers" in deployments)


def replicas(objects: list[Json], part: str) -> int:
    [found] = [each for each in of_kind(objects, "StatefulSet") if part_of(each) == part]
    number: int = found["spec"]["replicas"]
    return number


def one_address(objects: list[Json]) -> Json:
    [found] = [each for each in of_kind(objects, "Service") if part_of(each) == "haproxy"]
    return found


def test_the_configuration_of_haproxy_is_the_one_that_is_tried(objects: list[Json]) -> None:
    assert config(objects, "haproxy.cfg").strip() == CONFIG.read_text().strip()
    variables = environment(container(objects, "haproxy"))
    named = {name: value for name, value in variables.items() if name.startswith("PROXY_")}
    assert len(named) == replicas(objects, "proxy")
    assert set(named) <= set(re.findall(r"defined\((PROXY_\d+)\)", CONFIG.read_text()))
    settings = tomllib.loads(config(objects, "tracegrad.toml"))
    assert [f"http://{each}" for each in named.values()] == settings["push"]["proxies"]
    # Every variable is one that the file knows.
    assert set(variables) - set(named) <= set(re.findall(r"presetenv (\w+)", CONFIG.read_text()))


def test_commands_take_their_options(
    objects: list[Json], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proxy = container(objects, "proxy")
    given = {n: v for n, v in commands.parsed("tracegrad", proxy["args"]).items() if v is not None}
    monkeypatch.setenv("TRACEGRAD_API_KEY", KEY)
    (tmp_path / "tracegrad.toml").write_text(config(objects, "tracegrad.toml"))
    monkeypatch.chdir(tmp_path)
    read = ProxySettings(**given)  # type: ignore[arg-type]
    settings = tomllib.loads(config(objects, "tracegrad.toml"))
    assert list(read.upstreams) == settings["vllm"]["urls"]
    assert read.workers == settings.get("proxy", {}).get("workers", 1)
    ranks = container(objects, "trainer")
    words = [word.replace("$(NODE_RANK)", "0") for word in ranks["args"]]
    options = commands.torchrun_options(words)
    assert int(str(options["nproc_per_node"])) == ranks["resources"]["limits"]["nvidia.com/gpu"]
    if options["nnodes"] == "1:1":
        assert options["standalone"]
    else:
        assert int(str(options["nnodes"])) == replicas(objects, "trainer")


def test_engines_are_started_as_attach_mode_says(case: str, objects: list[Json]) -> None:
    engine = CASES[case].get("engine", {})
    own = commands.flags(container(objects, "engine")["args"])
    page = commands.attached_engine_flags()
    further = commands.flags(engine.get("extraArgs", []))
    if engine.get("gpus", 1) > 1:
        further["--tensor-parallel-size"] = str(engine["gpus"])
    elsewhere = {"--host", "--model"}
    assert set(own) == set(page) | set(further)
    assert {n: v for n, v in own.items() if n not in elsewhere} == {
        n: v for n, v in (page | further).items() if n not in elsewhere
    }


@pytest.mark.parametrize("part", ["proxy", "trainer", "workers", "test"])
def test_every_variable_is_read(part: str) -> None:
    assert list(commands.unknown(environment(container(render(LARGE), part)))) == []


def test_who_has_which_key() -> None:
    """The table of docs/attach.md."""
    has = {
        part_of(pod): set(environment(pod["spec"]["containers"][0])) for pod in pods(render(LARGE))
    }

    def having(variable: str) -> set[str]:
        return {part for part, variables in has.items() if variable in variables}

    assert having("TRACEGRAD_STORE") == {"proxy", "trainer", "workers"}
    assert having("TRACEGRAD_PROXY_CONTROL_KEY") == {"proxy", "trainer"}
    assert having("TRACEGRAD_API_KEY") == {"proxy", "workers", "test"}


def test_secrets_come_from_secrets_and_into_the_environment_alone(objects: list[Json]) -> None:
    elsewhere = [each for each in objects if each["kind"] != "Secret"]
    for secret in (KEY, CONTROL_KEY, PASSWORD):
        assert secret not in json.dumps(elsewhere)
    for pod in pods(objects):
        for volume in pod["spec"].get("volumes", ()):
            assert "secret" not in volume
    secrets = of_kind(objects, "Secret")
    made = {each["metadata"]["name"]: set(each["stringData"]) for each in secrets}
    given = {"keys": {"api-key", "control-key"}, "database": {"url"}, "hub": {"token"}}
    for reference in references(objects, "secretKeyRef"):
        assert reference["key"] in {**given, **made}[reference["name"]]


def references(thing: Any, kind: str) -> list[Json]:
    if isinstance(thing, dict):
        found = [thing[kind]] if kind in thing else []
        return found + [each for value in thing.values() for each in references(value, kind)]
    if isinstance(thing, list):
        return [each for value in thing for each in references(value, kind)]
    return []


def matches(selector: Json, labels: Json) -> bool:
    return selector.items() <= labels.items()


def selected(objects: list[Json], selector: Json) -> list[Json]:
    return [pod for pod in pods(objects) if matches(selector, pod["metadata"]["labels"])]


def test_a_service_selects_one_part_and_names_its_port(objects: list[Json]) -> None:
    services = of_kind(objects, "Service")
    assert {part_of(each) for each in services} >= {"haproxy", "proxy", "engine", "trainer"}
    for service in services:
        [pod] = selected(objects, service["spec"]["selector"])
        assert part_of(pod) == part_of(service)
        ports = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if part_of(service) != "haproxy":  # whose port is the values'
                assert port["port"] == ports[port["targetPort"]]


def test_a_pods_owner_selects_it(objects: list[Json]) -> None:
    for owner in of_kind(objects, "Deployment", "StatefulSet"):
        labels = owner["spec"]["template"]["metadata"]["labels"]
        assert matches(owner["spec"]["selector"]["matchLabels"], labels)
        if owner["kind"] == "StatefulSet":
            [service] = [
                each
                for each in of_kind(objects, "Service")
                if each["metadata"]["name"] == owner["spec"]["serviceName"]
            ]
            assert service["spec"]["clusterIP"] == "None"
            assert service["spec"]["selector"] == owner["spec"]["selector"]["matchLabels"]


def test_budgets_are_of_parts_that_there_are(objects: list[Json]) -> None:
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert {part_of(each) for each in budgets} == {"haproxy", "proxy", "engine"}
    for each in budgets:
        [pod] = selected(objects, each["spec"]["selector"]["matchLabels"])
        assert part_of(pod) == part_of(each)


def who_may(objects: list[Json], part: str) -> dict[str, set[int] | None]:
    """By the part that may reach it, on which ports; None: on any. `*`: whoever else is named."""
    found: dict[str, set[int] | None] = {}
    for policy in of_kind(objects, "NetworkPolicy"):
        if part_of(policy) != part:
            continue
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"].get("ingress", ()):
            ports = {each["port"] for each in rule["ports"]} if "ports" in rule else None
            for peer in rule.get("from", [{}]):
                labels = peer.get("podSelector", {}).get("matchLabels", {})
                found[labels.get("app.kubernetes.io/component", "*")] = ports
    return found


def test_who_reaches_whom(case: str, objects: list[Json]) -> None:
    # Their routes for weight pushes ask for no key; a broadcast takes any port.
    assert who_may(objects, "engine") == {"proxy": {8000}, "trainer": None}
    assert who_may(objects, "trainer") == {"trainer": None, "engine": None}
    assert who_may(objects, "workers") == {}
    proxy, haproxy = who_may(objects, "proxy"), who_may(objects, "haproxy")
    if case == "large":
        assert proxy == {key: {4141} for key in ("haproxy", "trainer", "*")}
        assert haproxy == {key: {4141} for key in ("*", "trainer", "workers", "test")}
    else:
        assert proxy == {key: {4141} for key in ("haproxy", "trainer")}
        assert haproxy == {"*": {4141}}
    if case == "trial":
        store = {key: {5432} for key in ("proxy", "trainer", "workers")}
        assert who_may(objects, "postgres") == store
    policies = {part_of(each) for each in of_kind(objects, "NetworkPolicy")}
    assert policies >= {part_of(pod) for pod in pods(objects)} - {"test"}


def test_a_policys_ports_are_those_of_its_pods(objects: list[Json]) -> None:
    for policy in of_kind(objects, "NetworkPolicy"):
        for pod in selected(objects, policy["spec"]["podSelector"]["matchLabels"]):
            own = {p["containerPort"] for p in pod["spec"]["containers"][0].get("ports", ())}
            named = {
                port["port"]
                for rule in policy["spec"].get("ingress", ())
                for port in rule.get("ports", ())
            }
            assert named <= own


def test_a_pod_may_do_no_more_than_it_must(objects: list[Json]) -> None:
    """Kubernetes' standard `restricted`, and a root file system that is only read."""
    for pod in pods(objects):
        spec, [only] = pod["spec"], pod["spec"]["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert "hostPath" not in json.dumps(spec)
        assert "memory" in only["resources"]["limits"]


def test_a_cluster_may_choose_the_users() -> None:
    """As OpenShift does, which refuses those that are named."""
    nobody = {"runAsUser": None, "runAsGroup": None}
    changed = {"podSecurityContext": {**nobody, "fsGroup": None}}
    for pod in pods(render({**LEAST, **changed, "haproxy": {"podSecurityContext": nobody}})):
        security = pod["spec"]["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(security)
        assert security["runAsNonRoot"] is True


@pytest.mark.parametrize("part", ["proxy", "engine", "trainer", "workers"])
def test_a_file_of_the_clusters_own_is_mounted(part: str) -> None:
    [pod] = [each for each in pods(render(LARGE)) if part_of(each) == part]
    assert LARGE["extraVolumes"][0] in pod["spec"]["volumes"]
    assert LARGE["extraVolumeMounts"][0] in pod["spec"]["containers"][0]["volumeMounts"]


def test_the_trial_database_has_shared_memory() -> None:
    """Its parallel queries; a container has 64 MiB by itself."""
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(render(TRIAL), "postgres")[
        "volumeMounts"
    ]


def test_proxies_have_variables_of_the_clusters_own() -> None:
    assert environment(container(render(LARGE), "proxy"))["SSL_CERT_FILE"] == "/ca/ca.pem"


@pytest.mark.parametrize(("values", "host"), [(LEAST, "0.0.0.0"), (LARGE, "::")])
def test_every_server_listens_where_probes_ask(values: Json, host: str) -> None:
    objects = render(values)
    for part in ("proxy", "engine"):
        assert f"--host={host}" in container(objects, part)["args"]
    assert environment(container(objects, "haproxy"))["LISTEN"] == f"{host}:4141"


def test_probes_ask_a_path_that_answers(objects: list[Json]) -> None:
    paths = {
        part_of(pod): {
            probe["httpGet"]["path"]
            for only in pod["spec"]["containers"]
            for name, probe in only.items()
            if name.endswith("Probe") and "httpGet" in probe
        }
        for pod in pods(objects)
    }
    assert paths["proxy"] == {"/healthz"}
    assert paths["engine"] == {"/health"}
    [monitor] = re.findall(r"monitor-uri (\S+)", CONFIG.read_text())
    assert paths["haproxy"] == {monitor}


def test_the_trainer_has_time_for_its_step() -> None:
    for timeout in (600, 1200):
        values = {**LEAST, "settings": {"checkpoint": {"stop_timeout_s": timeout}}}
        [trainer] = [
            each["spec"]["template"]["spec"]
            for each in of_kind(render(values), "StatefulSet")
            if part_of(each) == "trainer"
        ]
        assert trainer["terminationGracePeriodSeconds"] == timeout + 60


def test_a_change_of_settings_starts_what_reads_them_again() -> None:
    def sums(values: Json) -> dict[str, str]:
        return {
            part_of(pod): pod["metadata"]["annotations"]["checksum/settings"]
            for pod in pods(render(values))
            if "checksum/settings" in pod["metadata"].get("annotations", {})
        }

    before, after = sums(LEAST), sums({**LEAST, "settings": {"seed": 1}})
    assert set(before) == {"proxy", "trainer"}
    assert all(before[part] != after[part] for part in before)


def test_notes_say_what_to_do_next() -> None:
    said = chart.notes(LARGE)
    assert "http://run-tracegrad.ml.svc:80" in said
    assert "trainer status --state-dir /state/tracegrad" in said
    assert "replaced at once" in said
    assert "one for trials" in chart.notes(TRIAL)


WRONG = {
    "no keys": ({"auth": {}}, "auth: name a Secret"),
    "one key": ({"auth": {"apiKey": KEY}}, "auth: name a Secret"),
    "both": ({"auth": {"existingSecret": "keys", "apiKey": KEY}}, "leave auth.apiKey"),
    "short key": ({"auth": {"apiKey": "short", "controlKey": CONTROL_KEY}}, "apiKey"),
    "a rollout's key": ({"auth": {"apiKey": "tg-" + KEY, "controlKey": KEY}}, "apiKey"),
    "no store": ({"store": {}}, "store: name a Secret"),
    "two stores": (
        {"store": {"existingSecret": "database", "trial": {"enabled": True, "password": PASSWORD}}},
        "leave store.trial.enabled out",
    ),
    "no password": ({"store": {"trial": {"enabled": True}}}, "store.trial.password"),
    "no proxy": ({"proxy": {"replicas": 0}}, "replicas"),
    "more proxies than HAProxy has names for": ({"proxy": {"replicas": 17}}, "replicas"),
    "no engine": ({"engine": {"replicas": 0}}, "replicas"),
    "no GPU": ({"trainer": {"gpus": 0}}, "gpus"),
    "misspelt": ({"engines": {"replicas": 2}}, "engines"),
    "misspelt inside": ({"engine": {"replica": 2}}, "replica"),
    "wrong type": ({"trainer": {"nodes": "two"}}, "nodes"),
    "wrong size": ({"state": {"size": "200"}}, "size"),
    "our setting": ({"settings": {"state_dir": "/tmp"}}, r"settings\.state_dir: the chart sets it"),
    "our nested setting": ({"settings": {"vllm": {"urls": []}}}, r"settings\.vllm\.urls: the"),
    "no workers": ({"settings": {"rewards": {"commands": {"a": "true"}}}}, "set it to true"),
    "idle workers": ({"workers": {"enabled": True}}, "work for none"),
    "unknown service": ({"haproxy": {"service": {"type": "Cluster"}}}, "type"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_name(name: str) -> None:
    wrong, said = WRONG[name]
    with pytest.raises(helm_python.HelmError, match=said):
        render({**LEAST, **wrong})
