"""Keys and passwords: in no file, on no command line, in no child that has no use for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from rich.console import Console
from typer.testing import CliRunner

from support.system.shadowing_modules import modules_run, write_modules
from support.trainer.prepared_run import save_smallest_model
from tracegrad.cli.app import app as tracegrad
from tracegrad.proxy.config import ProxySettings
from tracegrad.settings_sources import SettingsError
from tracegrad.store import Store, StoreError
from tracegrad_trainer.cli import app
from tracegrad_trainer.cli.serve import ServeStack, proxy_process, with_control_key
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.launch import run_state
from tracegrad_trainer.launch.session import write_resolved_settings
from tracegrad_trainer.launch.torchrun import RankProcesses
from tracegrad_trainer.rl.rank_main import read_settings
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess

PASSWORD = "db-pass:word"
STORE = f"postgresql://me:{PASSWORD}@127.0.0.1:1/traces"
SHOWN = "postgresql://me:***@127.0.0.1:1/traces"
ADMIN, ENGINE = "the-admin's-long-key", "the-engines-own-key"
VARIABLES = {
    "TRACEGRAD_STORE": STORE,
    "TRACEGRAD_API_KEY": ADMIN,
    "TRACEGRAD_PROXY_ADMIN_KEY": ADMIN,
    "TRACEGRAD_TRAINER_PROXY__STORE": STORE,
    "TRACEGRAD_PROXY_UPSTREAM_API_KEY": "a-providers-key",
    "VLLM_API_KEY": ENGINE,
}


@pytest.fixture
def settings(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerSettings:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "state" / "run").mkdir(parents=True, mode=0o700)
    return with_control_key(load_settings(None, [f"model={model}", f"state_dir={tmp_path}/state"]))


def control_key_of(settings: TrainerSettings) -> str:
    key = settings.proxy.control_key
    assert key is not None
    return key.get_secret_value()


def test_each_start_has_a_control_key_of_its_own_unless_one_is_set(
    settings: TrainerSettings,
) -> None:
    bare = load_settings(None, [f"model={settings.model}", "proxy.port=4142"])
    one, other = (control_key_of(with_control_key(bare)) for _ in range(2))
    assert one != other
    assert len(one) == 64
    given = bare.proxy.model_copy(update={"control_key": SecretStr("k" * 20)})
    assert control_key_of(with_control_key(bare.model_copy(update={"proxy": given}))) == "k" * 20


def test_what_is_stored_shown_and_written_has_none_of_them(
    settings: TrainerSettings, tmp_path: Path
) -> None:
    stack = ServeStack(settings, Console(quiet=True))
    stack.state = run_state.RunState(settings.state_dir, "serve")
    stack.report_stage("starting", store=str(settings.proxy.store))
    sets = [f"--set={name}={tmp_path / name}" for name in ("model", "state_dir")]
    save_smallest_model(tmp_path / "model")  # a plan reads its shapes
    dry = CliRunner().invoke(app.app, ["serve", "--dry-run", "--json", *sets])
    assert dry.exit_code == 0, dry.output
    written = write_resolved_settings(settings).read_text()
    files = "".join(p.read_text() for p in (settings.state_dir / "run").iterdir() if p.is_file())
    shown = [json.dumps(settings.stored()), dry.output, written, files, repr(settings)]
    for text in shown:
        for secret in (PASSWORD, ADMIN, ENGINE, control_key_of(settings), "a-providers-key"):
            assert secret not in text
    assert settings.stored()["proxy"]["store"] == SHOWN


def test_ranks_read_the_same_settings_from_file_and_environment(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_resolved_settings(settings)
    ranks = RankProcesses(settings, file)
    assert not {*VARIABLES} - {"TRACEGRAD_STORE", "VLLM_API_KEY"} & ranks.env.keys()
    for name in VARIABLES:
        monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match="give the whole URL in TRACEGRAD_STORE"):
        read_settings(file)
    for name, value in ranks.env.items():
        monkeypatch.setenv(name, value)
    read = read_settings(file)
    assert read.proxy.store.get_secret_value() == STORE
    assert read.proxy.admin_key is None
    assert control_key_of(read) == control_key_of(settings)
    assert read.vllm.api_key == SecretStr(ENGINE)
    assert read.stored() == settings.stored()


def test_each_child_holds_what_it_needs_and_its_command_line_nothing(
    settings: TrainerSettings,
) -> None:
    control = control_key_of(settings)
    children: dict[str, ChildProcess] = {
        "vllm": VllmProcess(settings.vllm),
        "proxy": proxy_process(settings),
        "ranks": RankProcesses(settings, Path("settings.json")),
    }
    holds = {
        name: {secret for secret in (STORE, ADMIN, ENGINE, control, "a-providers-key")
               if secret in child.env.values()}
        for name, child in children.items()
    }  # fmt: skip
    assert holds == {
        "vllm": {ENGINE},
        "proxy": {STORE, ADMIN, ENGINE, control},
        "ranks": {STORE, ENGINE, control},
    }
    for child in children.values():
        assert child.env["PYTHONSAFEPATH"] == "1"
        for secret in (PASSWORD, ADMIN, ENGINE, control):
            assert secret not in " ".join(child.command)


def test_status_asks_for_the_password_that_no_file_holds(
    settings: TrainerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_resolved_settings(settings)
    command = ["status", "--state-dir", str(settings.state_dir)]
    whole = CliRunner().invoke(app.app, command)
    assert "Connection refused" in whole.output or "connection" in whole.output
    monkeypatch.delenv("TRACEGRAD_STORE")
    masked = CliRunner().invoke(app.app, command)
    assert masked.exit_code == 2
    assert f"the password of {SHOWN} is kept in no file" in masked.output
    assert PASSWORD not in whole.output + masked.output


@pytest.mark.parametrize(
    "url",
    [
        STORE,
        f"postgresql://me:{PASSWORD}@127.0.0.1:no-port/traces",
        f"postgresql://127.0.0.1:1/traces?user=me&password={PASSWORD}",
        f"postgresql://me:{PASSWORD}@127.0.0.1:1/traces?sslmode=what",
        f"mysql://me:{PASSWORD}@127.0.0.1/traces",
        f"postgresql://me:@{PASSWORD}@127.0.0.1:1/traces",
        f"postgres:/me:{PASSWORD}@127.0.0.1/traces",
    ],
)
def test_no_error_of_the_store_repeats_a_password(url: str) -> None:
    with pytest.raises((ValueError, StoreError)) as caught:
        Store.open(url)
    assert PASSWORD not in f"{caught.value} {caught.value!r}"
    done = CliRunner().invoke(tracegrad, ["proxy", "--port=0"], env={"TRACEGRAD_STORE": url})
    assert done.exit_code == 2, done.output
    assert "store" in done.output
    assert PASSWORD not in done.output


def test_a_planted_module_runs_in_no_child_and_parts_of_ones_own_are_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that gets as far as the model, which is none."""
    here = write_modules(tmp_path / "here", keep="def keep(turn, rollout): return True")
    monkeypatch.chdir(here)
    file = tmp_path / "settings.json"
    table: dict[str, Any] = {"model": str(model), "state_dir": str(tmp_path / "state")}
    file.write_text(json.dumps(table | {"batches": {"predicate": "keep:keep"}}))
    command = [sys.executable, "-m", "tracegrad_trainer.rl.offline_worker", str(file)]
    child = ChildProcess("ranks", command, log=tmp_path / "log")
    child.start()
    try:
        with pytest.raises(ChildError, match=r"model = .*: its tokenizer cannot be loaded"):
            child.wait_until_ready(lambda: False, timeout_s=240)
    finally:
        child.stop()
    assert modules_run(here) == ""


def test_a_url_with_a_password_is_shown_without() -> None:
    settings = ProxySettings(store=STORE)  # type: ignore[arg-type]
    assert str(settings.store) == SHOWN
    assert PASSWORD not in f"{settings!r} {settings} {settings.model_dump_json()}"
    assert settings.store.get_secret_value() == STORE
