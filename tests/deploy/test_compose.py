"""deploy/compose.yaml: it says what it means, and what it starts takes what it is given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from compose_spec import PyCompose

from support.deploy import commands, compose
from support.deploy.compose import CPU_FILE, FILE, FOLDER, SECRETS, Json, MissingVariable
from support.packages.wheel import ROOT
from support.trainer.prepared_run import save_smallest_model
from tracegrad.proxy.config import ProxySettings
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings

SERVICES = compose.services()
ENGINES = [name for name in SERVICES if name.startswith("engine-")]
PROXIES = [name for name in SERVICES if name.startswith("proxy-")]
OURS = [*ENGINES, *PROXIES, "trainer", "workers"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smallest_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerSettings:
    """Of the ranks, with the environment that they get."""
    for name, value in SERVICES["trainer"]["environment"].items():
        monkeypatch.setenv(name, value)
    return load_settings(FOLDER / "tracegrad.toml", [f"model={model}", f"state_dir={tmp_path}"])


def names(listed: Any) -> set[str]:
    """Of networks or dependencies, as a list or a table."""
    return set(listed or ())


@pytest.mark.parametrize("path", [FILE, CPU_FILE])
def test_it_is_of_composes_specification(path: Path) -> None:
    # The validator knows no merged keys, which are YAML's and not the specification's.
    text = yaml.safe_dump(compose.load(path))
    assert set(PyCompose.from_yaml(text).service_names()) == set(compose.services(path))


def test_what_the_specification_does_not_know_is_found() -> None:
    """The check before this one can fail."""
    wrong = compose.load()
    wrong["services"]["haproxy"]["helthcheck"] = {}
    with pytest.raises(ValueError, match="helthcheck"):
        PyCompose.from_yaml(yaml.safe_dump(wrong))


def test_it_has_two_of_what_there_may_be_several_of() -> None:
    assert (len(ENGINES), len(PROXIES)) == (2, 2)


def test_the_example_names_every_variable_and_no_other() -> None:
    asked = compose.variables_of(FILE.read_text()) | compose.variables_of(CPU_FILE.read_text())
    assert set(compose.example()) == asked


@pytest.mark.parametrize("secret", [*SECRETS, "MODEL"])
def test_what_is_missing_is_named(secret: str) -> None:
    given = {**compose.example(), **SECRETS}
    compose.load(given=given)
    with pytest.raises(MissingVariable, match=rf"{secret}: .*deploy/\.env"):
        compose.load(given={**given, secret: ""})


def test_secrets_stand_in_the_environment_alone() -> None:
    assert not any(compose.example()[name] for name in SECRETS)

    def found(thing: Any, place: str = "") -> Iterator[str]:
        if isinstance(thing, dict):
            for name, value in thing.items():
                yield from found(value, f"{place}.{name}")
        elif isinstance(thing, list):
            for value in thing:
                yield from found(value, place)
        elif any(secret in str(thing) for secret in SECRETS.values()):
            yield place

    places = set(found(SERVICES))
    assert places
    assert all(re.fullmatch(r"\.[\w-]+\.environment\.\w+", place) for place in places), places


def test_who_has_which_key() -> None:
    """The table of docs/attach.md."""
    having = {
        variable: {n for n, each in SERVICES.items() if variable in each.get("environment", {})}
        for variable in ("TRACEGRAD_STORE", "TRACEGRAD_PROXY_CONTROL_KEY", "TRACEGRAD_API_KEY")
    }
    assert having == {
        "TRACEGRAD_STORE": {*PROXIES, "trainer", "workers"},
        "TRACEGRAD_PROXY_CONTROL_KEY": {*PROXIES, "trainer"},
        "TRACEGRAD_API_KEY": {*PROXIES, "workers"},
    }


def test_one_address_is_published_and_on_loopback() -> None:
    published = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert published == {"haproxy": ["127.0.0.1:4141:4141"]}


def test_who_reaches_whom() -> None:
    members = {
        network: {name for name, each in SERVICES.items() if network in names(each["networks"])}
        for network in compose.load()["networks"]
    }
    assert members == {
        "agents": {"haproxy"},
        "proxies": {"haproxy", *PROXIES, "workers"},
        # Their routes for weight pushes ask for no key: no agent and no command of a reward.
        "engines": {*ENGINES, *PROXIES, "trainer", "haproxy", "postgres"},
        "store": {"postgres", *PROXIES, "workers"},
    }
    assert compose.load()["networks"]["store"] == {"internal": True}


@pytest.mark.parametrize("name", [*ENGINES, "trainer"])
def test_a_push_has_one_way(name: str) -> None:
    """NCCL takes any interface, and Docker drops what goes from one network to another."""
    assert names(SERVICES[name]["networks"]) == {"engines"}


def test_what_a_service_calls_is_in_a_network_of_its_own(settings: TrainerSettings) -> None:
    def reached(name: str) -> set[str]:
        own = names(SERVICES[name]["networks"])
        return {other for other, each in SERVICES.items() if own & names(each["networks"])}

    called = (settings.proxy_url or "", *settings.vllm.urls, *settings.push.proxies)
    assert {urlsplit(url).hostname for url in called} | {"postgres"} <= reached("trainer")
    for name, each in SERVICES.items():
        assert names(each.get("depends_on")) <= reached(name)


@pytest.mark.parametrize("name", [*ENGINES, "trainer"])
def test_what_was_compiled_can_be_loaded(name: str) -> None:
    """Docker adds noexec to a tmpfs that does not say exec."""
    [temporary] = SERVICES[name]["tmpfs"]
    path, _, options = temporary.partition(":")
    assert path == "/tmp"
    assert {"exec", "mode=1777"} <= set(options.split(","))


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_may_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    if name in OURS:
        assert user_of(service) == "10001:10001"
    else:
        assert service["user"] not in ("root", "0", 0)


def user_of(service: Json) -> str:
    """Whom the stage of its Dockerfile runs as."""
    file = (ROOT / service["build"].get("dockerfile", "Dockerfile")).read_text(encoding="utf-8")
    stages = re.split(r"^FROM ", file, flags=re.M)[1:]
    target = service["build"].get("target")
    of = {stage.split("\n", 1)[0].split(" AS ")[-1].strip(): stage for stage in stages}
    stage = of[target] if target else stages[-1]
    while (user := re.search(r"^USER (\S+)$", stage, re.M)) is None:
        stage = of[stage.split()[0]]  # of the stage that it begins with
    return user[1]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_started_again_and_ends_in_order(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"  # a reboot ends it in order, with 0
    assert "stop_grace_period" in service
    for other, how in service.get("depends_on", {}).items():
        assert other in SERVICES
        if how["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[other]


def test_the_trainer_has_time_for_its_step(settings: TrainerSettings) -> None:
    grace = compose.seconds(SERVICES["trainer"]["stop_grace_period"])
    assert grace > settings.checkpoint.stop_timeout_s


def test_every_volume_is_declared_and_can_be_written() -> None:
    declared = set(compose.load()["volumes"])
    mounts = [mount.split(":") for each in SERVICES.values() for mount in each.get("volumes", ())]
    named = {source for source, *_ in mounts if not source.startswith(".")}
    assert named == declared
    for source, _, *mode in mounts:
        if source.startswith("."):
            assert (FOLDER / source).is_file(), source
            assert mode == ["ro"]
    # A volume gets the owner of the image's folder.
    made = "mkdir /data /models /state && chown 10001:10001 /data /models /state"
    for dockerfile in (ROOT / "Dockerfile", FOLDER / "engine.Dockerfile"):
        assert made in dockerfile.read_text(encoding="utf-8")
    ours = {target for name in OURS for _, target, *_ in map_mounts(name)}
    assert ours == {"/models", "/state", "/data"}


def map_mounts(name: str) -> list[list[str]]:
    """Volumes of a service, without files."""
    mounts = [mount.split(":") for mount in SERVICES[name].get("volumes", ())]
    return [mount for mount in mounts if not mount[0].startswith(".")]


@pytest.mark.parametrize("name", OURS)
def test_every_variable_is_read(name: str) -> None:
    assert list(commands.unknown(SERVICES[name]["environment"])) == []


def test_a_misspelt_variable_is_found() -> None:
    """The check before this one can fail."""
    wrong = {"TRACEGRAD_STOER": "", "TRACEGRAD_PROXY_HELT": "", "TRACEGRAD_TRAINER_VLLM__DTYP": ""}
    assert len(list(commands.unknown(wrong))) >= len(wrong)


@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_takes_its_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = commands.parsed("tracegrad", SERVICES[name]["command"])
    given = {option: value for option, value in options.items() if value is not None}
    for variable, value in SERVICES[name]["environment"].items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(FOLDER)  # its settings file is the same
    proxy = ProxySettings(**given)  # type: ignore[arg-type]
    assert (proxy.host, proxy.port, proxy.held) == ("0.0.0.0", 4141, True)
    assert proxy.upstreams == tuple(f"http://{engine}:8000" for engine in ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_started_as_attach_mode_says(name: str) -> None:
    own, page = commands.flags(SERVICES[name]["command"]), commands.attached_engine_flags()
    assert set(own) == set(page)
    elsewhere = {"--host", "--model"}
    assert {n: v for n, v in own.items() if n not in elsewhere} == {
        n: v for n, v in page.items() if n not in elsewhere
    }


def test_engines_and_ranks_are_started_with_what_they_need() -> None:
    options = commands.torchrun_options(SERVICES["trainer"]["command"])
    assert options["standalone"]
    assert SERVICES["trainer"]["entrypoint"][-1] == "/etc/tracegrad/tracegrad.toml"
    assert commands.parsed("trainer", SERVICES["workers"]["command"])["config"] == Path(
        "/etc/tracegrad/tracegrad.toml"
    )


def test_the_settings_are_of_these_services(settings: TrainerSettings) -> None:
    engine = commands.flags(SERVICES[ENGINES[0]]["command"])
    assert settings.vllm.urls == tuple(f"http://{name}:8000" for name in ENGINES)
    assert settings.vllm.max_model_len == int(engine["--max-model-len"] or 0)
    assert settings.vllm.served_model_name == engine["--served-model-name"]
    assert settings.proxy_url == "http://haproxy:4141"
    assert settings.push.proxies == tuple(f"http://{name}:4141" for name in PROXIES)
    servers = SERVICES["haproxy"]["environment"]
    assert servers == {f"PROXY_{n}": f"{name}:4141" for n, name in enumerate(PROXIES)}


def test_without_gpus_the_ranks_and_the_engines_compute_on_a_cpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = compose.services(CPU_FILE)
    assert set(changed) == {*ENGINES, "trainer"}
    for each in changed.values():
        assert each["deploy"]["resources"]["reservations"]["devices"] == []  # !reset
        assert each["build"] == {"target": "cpu"}
    environment = {**SERVICES["trainer"]["environment"], **changed["trainer"]["environment"]}
    assert list(commands.unknown(environment)) == []
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    overrides = [f"model={model}", f"state_dir={tmp_path}"]
    settings = load_settings(FOLDER / "tracegrad.toml", overrides)
    assert (settings.fsdp.device, settings.vllm.dtype) == ("cpu", "float32")
    commands.torchrun_options(changed["trainer"]["command"])
