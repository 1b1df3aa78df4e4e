"""What a new user does wrong: one line that names it and its mend, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.prepared_run import save_smallest_model
from tracegrad.settings_sources import SettingsError, setting_names
from tracegrad.store import Store
from tracegrad_trainer.cli.app import app
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.launch.session import StartError, lock_state_folder
from tracegrad_trainer.sft.config import check_settings_used


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: Is a directory"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b"x = [", "Invalid value"),
    ],
)
def test_a_file_of_settings_that_is_none_is_named(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(SettingsError) as error:
        load_settings(file)
    assert str(error.value).startswith(f"{file}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_that_is_nowhere_given_is_named_with_where_to_give_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as error:
        load_settings()
    assert str(error.value) == (
        "model: is not set: write it into the settings file, or give --set model=VALUE"
    )


def test_a_value_where_a_table_belongs_says_how_to_write_it(tmp_path: Path) -> None:
    model = save_smallest_model(tmp_path / "model")
    with pytest.raises(SettingsError, match=r"^optim: is a table of settings, not 3: .*\[optim\]"):
        load_settings(None, [f"model={model}", f"state_dir={tmp_path}", "optim=3"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("optim.scale_by_groups=false", "there are no groups; leave it out"),
        ("batches.group_size=4", "there are no groups; set --tokens-per-step"),
        ("max_steps=3", "set --epochs"),
        ("data.tags=split=x", "leave it out"),
        ("vllm.max_model_len=512", "leave it out"),
        ("gpus.share=false", "leave it out"),
        ("proxy.port=4242", "leave it out"),
        ("checkpoint.every_steps=10", "set --save-every"),
        ("checkpoint.stop_timeout_s=5", "leave it out"),
        ("checkpoint.keep_every=10", "set --save-every"),
        ("checkpoint.resume_from=3", "goes on from its last checkpoint"),
    ],
)
def test_sft_refuses_what_it_does_not_use(
    given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_smallest_model(tmp_path / "model")
    words = ["sft", "--model", str(model), "--state-dir", str(tmp_path / "s"), "--set", given]
    with pytest.raises(SystemExit) as end:
        app(words)
    assert end.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    name = given.partition("=")[0]
    assert line.startswith(f"trainer sft: {name}: trainer sft does not use it")
    assert said in line
    assert not (tmp_path / "s").exists()


def test_sft_may_have_the_gpus_that_a_file_gives_to_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_smallest_model(tmp_path / "model")
    file = tmp_path / "mine.toml"
    file.write_text("[gpus]\nvllm = '0'\ntrain = '1'\n")
    Store.open(f"sqlite:///{tmp_path}/s/store.db").close()
    words = ["sft", "--config", str(file), "--model", str(model), "--state-dir", f"{tmp_path}/s"]
    for more in ([], ["--set", "gpus.train=0-1"]):
        with pytest.raises(SystemExit):
            app([*words, "--dry-run", *more])
        assert "no rollouts match" in capsys.readouterr().out, "the settings are in order"
    with pytest.raises(SystemExit) as end:
        app([*words, "--set", 'gpus={"train": "0"}'])
    assert end.value.code == 2
    assert "gpus: trainer sft uses gpus.train of it alone; set that" in capsys.readouterr().err


def test_every_setting_is_used_by_sft_or_refused(tmp_path: Path) -> None:
    """Of a table that it uses, all but those that are another command's."""
    used = {"model", "reference", "state_dir", "ranks", "seed", "proxy.store", "gpus.train"}
    tables = {"batches", "objective", "optim", "fsdp", "checkpoint", "metrics"}
    for name in setting_names(TrainerSettings):
        table, _, leaf = name.partition(".")
        try:
            check_settings_used([f"{name}=1"])
        except ValueError:
            assert name not in used
        else:
            assert name in used or table in tables or not leaf, name


def test_a_misspelt_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACEGRAD_TRAINER_OPTIMS__LR", "1")
    monkeypatch.setenv("TRACEGRAD_PROXY_HELDD", "1")
    monkeypatch.setenv("TRACEGRAD_STOER", "sqlite:///x.db")
    with pytest.raises(SystemExit):
        app(["serve", "--dry-run", "--model", str(tmp_path / "none")])
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("; did")[2] for line in lines[:3]] == [
        " you mean TRACEGRAD_STORE?",
        " you mean TRACEGRAD_TRAINER_OPTIM?",
        " you mean TRACEGRAD_PROXY_HELD?",
    ]
    assert "there is no such folder" in lines[3]


@pytest.mark.parametrize(
    ("variable", "value", "setting", "file"),
    [
        ("TRACEGRAD_TRAINER_OPTIM__LR", "fast", "optim.lr", ""),
        ("tracegrad_trainer_optim__lr", "fast", "optim.lr", ""),
        ("TRACEGRAD_TRAINER_OPTIM__LRR", "1", "optim.lrr", ""),
        ("TRACEGRAD_TRAINER_PROXY__PORT", "abc", "proxy.port", ""),
        ("TRACEGRAD_PROXY_PORT", "abc", "proxy.port", ""),
        ("TRACEGRAD_PROXY_PORT", "abc", "proxy.port", "[proxy]\nhost = '127.0.0.1'"),
        ("TRACEGRAD_API_KEY", "short", "proxy.admin_key", ""),
    ],
)
def test_a_wrong_value_of_the_environment_names_its_variable(
    variable: str,
    value: str,
    setting: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    config = tmp_path / "mine.toml"
    config.write_text(file)
    with pytest.raises(SettingsError) as error:
        load_settings(config, [f"model={save_smallest_model(tmp_path / 'model')}"])
    assert str(error.value).startswith(f"{setting}: ")
    assert str(error.value).endswith(f" (given by {variable.upper()})")


def test_a_state_folder_that_is_a_file_names_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.touch()
    with pytest.raises(StartError, match=rf"^state_dir: {file} cannot be written: Not a directory"):
        lock_state_folder(file)
