"""`tracegrad proxy` as a process, and its settings."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import typer
from pydantic import SecretStr, ValidationError
from typer.testing import CliRunner

from tracegrad.proxy.cli import proxy_command, serve
from tracegrad.proxy.config import DEFAULT_STORE, ProxySettings
from tracegrad.store import DEFAULT_URL, Store

RUN = "import typer; from tracegrad.proxy.cli import proxy_command; typer.run(proxy_command)"


COMMAND = typer.Typer(add_completion=False)
COMMAND.command()(proxy_command)


def start(cwd: Path, *flags: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *flags],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refused(cwd: Path, *flags: str, **env: str) -> str:
    """What it says when it does not start."""
    process = start(cwd, *flags, **env)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert out == ""
    return err


def refused_here(cwd: Path, *flags: str, **env: str) -> str:
    """The same in this process: nothing of what is refused so early takes another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for name, value in env.items():
            patch.setenv(name, value)
        done = CliRunner().invoke(COMMAND, flags)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    return done.stderr


def test_it_serves_records_and_stops(tmp_path: Path, engine_url: str) -> None:
    process = start(tmp_path, "--upstream", engine_url, "--port", "0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.match(r"tracegrad proxy on (http://127\.0\.0\.1:\d+) -> ", line)
        assert match is not None, line
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{match[1]}/rollouts/r1/v1/chat/completions", json=body, timeout=20)
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in out + err
    assert process.returncode in (0, -signal.SIGINT)
    with Store.open(f"sqlite:///{tmp_path}/.tracegrad/store.db", create=False) as store:
        assert len(store.rollout_turns("r1")) == 1


def test_a_tokenizer_that_cannot_be_had_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    err = refused(tmp_path, "--tokenizer", "acme/tiny", "--port", "0")
    assert re.fullmatch(r"tracegrad proxy: tokenizer: acme/tiny: .* hf download acme/tiny\n", err)


def test_a_misspelt_setting_of_the_file_names_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "tracegrad.toml").write_text("[proxy]\nupstrem = 'http://127.0.0.1:1'\n")
    err = refused_here(tmp_path, "--port", "0")
    wanted = "tracegrad proxy: upstrem: there is no such setting; did you mean upstream?\n"
    assert err == wanted


def test_a_misspelt_variable_is_named_and_does_not_keep_it_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("UPSTREEM", "API_KEY", "ZZZZZZ", "MODEL", "STORE"):
            monkeypatch.setenv(f"TRACEGRAD_PROXY_{name}", "sqlite:///x.db")
        lines = refused_here(tmp_path, "--port", str(port)).splitlines()
    said = "tracegrad proxy: TRACEGRAD_PROXY_{}: there is no such setting"
    assert lines[:3] == [
        said.format("API_KEY") + "; did you mean TRACEGRAD_API_KEY?",
        said.format("UPSTREEM") + "; did you mean TRACEGRAD_PROXY_UPSTREAM?",
        said.format("ZZZZZZ"),
    ]
    [rest] = lines[3:]
    assert "in use" in rest, "it went on"


def test_a_wrong_value_of_the_environment_names_its_variable(tmp_path: Path) -> None:
    err = refused_here(tmp_path, TRACEGRAD_PROXY_PORT="abc")
    assert err.startswith("tracegrad proxy: port: ")
    assert err.endswith(" (given by TRACEGRAD_PROXY_PORT)\n")
    flags = ("--port", "4000", "--upstream", "nothing")
    err = refused_here(tmp_path, *flags, TRACEGRAD_PROXY_UPSTREAM="http://127.0.0.1:1")
    assert err.startswith("tracegrad proxy: upstream: ")
    assert "given by" not in err, "the flag's value is wrong, not the variable's"


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = refused(tmp_path, "--port", str(port))
    assert err == (
        f"tracegrad proxy: port {port} of 127.0.0.1 is in use; choose another with --port\n"
    )
    assert not (tmp_path / ".tracegrad").exists()


def test_several_workers_are_refused_where_the_system_lacks_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(typer.Exit) as end:
        serve(ProxySettings(workers=2))
    assert end.value.exit_code == 2
    said = "tracegrad proxy: workers: more than one runs on Linux only; leave it out here\n"
    assert capsys.readouterr() == ("", said)
    assert [*tmp_path.iterdir()] == []


def test_an_open_address_is_refused_here(tmp_path: Path) -> None:
    err = refused(tmp_path, "--host", "0.0.0.0")
    assert err.startswith("tracegrad proxy: host: 0.0.0.0 is not a loopback address")
    assert "TRACEGRAD_API_KEY" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("too-short-a-key", "it has 15 characters"),
        ("long-enough-but with spaces", "visible ASCII"),
        ("tg-" + "a-rollouts-key", "belong to rollouts"),
    ],
)
def test_a_weak_admin_key_is_refused_and_not_shown(tmp_path: Path, key: str, words: str) -> None:
    err = refused_here(tmp_path, "--host", "0.0.0.0", TRACEGRAD_API_KEY=key)
    assert err.startswith("tracegrad proxy: admin_key: ")
    assert words in err
    assert key not in err
    assert err.count("\n") == 1


def test_a_hook_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("def clean(record): return record\n")
    err = refused(tmp_path, "--redact", "hooks:clean", "--redact", "hooks:wash")
    assert err.startswith("tracegrad proxy: redact[1]: cannot load 'hooks:wash'")
    assert err.count("\n") == 1
    assert not (tmp_path / ".tracegrad").exists()


def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    err = refused_here(tmp_path, "--port", "0", "--store", "nonsense")
    assert err.startswith("tracegrad proxy: store nonsense: ")
    assert err.count("\n") == 1


def test_a_stores_password_is_not_shown(tmp_path: Path) -> None:
    err = refused_here(tmp_path, "--port", "0", "--store", "nonsense://me:geheim@host/db")
    assert "nonsense://me:***@host/db" in err
    assert "geheim" not in err


def test_flags_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tracegrad.toml").write_text(
        '[proxy]\nport = 1111\nstore = "sqlite:///file.db"\nupstream = "http://file:1"\n'
        "[trainer]\nsteps = 3\n"
    )
    monkeypatch.setenv("TRACEGRAD_STORE", "sqlite:///environment.db")
    monkeypatch.setenv("TRACEGRAD_PROXY_PORT", "2222")
    settings = ProxySettings(port=3333)
    assert settings.port == 3333
    assert settings.store.get_secret_value() == "sqlite:///environment.db"
    assert settings.upstream == "http://file:1"
    assert ProxySettings().port == 2222
    assert ProxySettings(store="sqlite:///flag.db").store.get_secret_value() == "sqlite:///flag.db"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"port": 70000}, "port"),
        ({"upstream": "localhost:8000"}, "upstream"),
        ({"host": "192.168.1.4"}, "host"),
        ({"host": "example.org"}, "host"),
        ({"host": "0.0.0.0", "admin_key": "short"}, "admin_key"),
        ({"admin_key": "with a space in between"}, "admin_key"),
        ({"upstream": ["http://a:1", "b:2"]}, "upstream"),
        ({"upstream": "http://a:1,http://a:1/v1"}, "upstream"),
        ({"upstream_kind": "vlm"}, "upstream_kind"),
        ({"redact": ["hooks.clean"]}, "redact"),
        ({"max_wait_s": 0}, "max_wait_s"),
        ({"prot": 1}, "prot"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ProxySettings(**given)  # type: ignore[arg-type]
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


def test_a_broken_settings_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tracegrad.toml").write_text("[proxy\n")
    with pytest.raises(ValueError, match=r"tracegrad\.toml: "):
        ProxySettings()


def test_an_openai_base_url_is_understood() -> None:
    settings = ProxySettings(upstream="http://127.0.0.1:8000/v1/")
    assert settings.upstreams == ("http://127.0.0.1:8000",)


def test_replicas_are_a_list_or_have_commas_between() -> None:
    reported = ["http://a:8000/v1", "http://b:8000/"]
    for upstream in (reported, ", ".join(reported)):
        settings = ProxySettings(upstream=upstream)  # type: ignore[arg-type]
        assert settings.upstreams == ("http://a:8000", "http://b:8000")
    assert ProxySettings().upstreams == ("http://127.0.0.1:8000",)


def test_any_address_will_do_with_an_admin_key() -> None:
    for host in ("0.0.0.0", "192.168.1.4", "::"):
        assert ProxySettings(host=host, admin_key=SecretStr("k" * 16)).host == host


def test_keys_are_in_no_dump_and_no_error() -> None:
    secret = "a-secret-of-the-admin's"
    settings = ProxySettings(admin_key=SecretStr(secret), upstream_api_key=SecretStr(secret))
    shown = [str(settings), repr(settings), settings.model_dump_json(), str(settings.model_dump())]
    with pytest.raises(ValidationError) as caught:
        ProxySettings(admin_key=SecretStr(secret + " "), port="no port", prot=secret)  # type: ignore[arg-type,call-arg]
    assert len(caught.value.errors()) == 3
    assert secret not in "".join([*shown, str(caught.value), repr(caught.value)])


def test_a_child_process_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ProxySettings(
        upstream=["http://a:1", "http://b:2"],  # type: ignore[arg-type]
        upstream_api_key=SecretStr("engine"),
        store="postgresql://me:secret@there/db",  # type: ignore[arg-type]
        redact=["a.b:c", "d:e"],
        admin_key=SecretStr("k" * 20),
        control_key=SecretStr("c" * 20),
        host="0.0.0.0",
        held=True,
        head_timeout_s=1.5,
    )
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert ProxySettings() == settings


def test_loopback_has_many_names() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert ProxySettings(host=host).host == host


def test_the_default_store_is_the_stores_own() -> None:
    assert DEFAULT_STORE == DEFAULT_URL


def test_a_variable_of_somebody_elses_is_not_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRACEGRAD_STORE", raising=False)
    monkeypatch.setenv("STORE", "/var/lib/warehouse")
    assert ProxySettings().store.get_secret_value() == DEFAULT_STORE
    Path("tracegrad.toml").write_text('[proxy]\nstore = "sqlite:///file.db"\n')
    assert ProxySettings().store.get_secret_value() == "sqlite:///file.db"
    monkeypatch.setenv("TRACEGRAD_STORE", "sqlite:///environment.db")
    assert ProxySettings().store.get_secret_value() == "sqlite:///environment.db"
