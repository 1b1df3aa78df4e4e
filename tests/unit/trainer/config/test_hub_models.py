"""`model = "acme/tiny"`: a run keeps the commit that it began with."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from support.chat.fake_hub import put_in_cache
from support.trainer.prepared_run import fill, save_smallest_model, settings_of
from tracegrad.settings_sources import SettingsError
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.launch.session import write_resolved_settings

NAME = "acme/tiny"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_run_keeps_the_commit_that_it_began_with(cache: Path, tmp_path: Path) -> None:
    model = save_smallest_model(tmp_path / "model")
    old = put_in_cache(cache, NAME, model, OLD)
    asked = [f"model={NAME}", f"reference={NAME}", "objective.kl=k3", "proxy.held=true"]
    mine = [*asked, f"state_dir={tmp_path / 'state'}"]
    first = load_settings(None, mine)
    assert (first.model, first.reference, first.vllm.model) == (old, old, str(old))
    (tmp_path / "state" / "run").mkdir(parents=True)
    write_resolved_settings(first)  # as every command that trains does

    new = put_in_cache(cache, NAME, model, NEW)
    again = load_settings(None, mine)
    assert (again.model, again.reference, again.vllm.model) == (old, old, str(old))
    assert load_settings(None, [*mine, f"model={NAME}@main"]).model == new
    assert load_settings(None, [*asked, f"state_dir={tmp_path / 'other'}"]).model == new


def test_a_model_that_cannot_be_had_is_one_line_that_names_the_setting(
    cache: Path, tmp_path: Path
) -> None:
    for setting in ("model", "reference"):
        given = [f"model={tmp_path}", f"state_dir={tmp_path}", f"{setting}={NAME}"]
        with pytest.raises(SettingsError, match=rf"^{setting}: {NAME}: .* hf download {NAME}$"):
            load_settings(None, given)


def test_nothing_is_fetched_for_misspelt_settings(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracegrad_trainer.config.trainer.find_model_folder", pytest.fail)
    given = [f"model={NAME}", "optim.learning_rate=1", "data.tags=split=x", "fsdp.lora.rnk=8"]
    with pytest.raises(SettingsError) as raised:
        load_settings(None, given)
    wrong = ["optim.learning_rate", "fsdp.lora.rnk"]
    meant = ["optim.lr", "fsdp.lora.rank"]
    assert str(raised.value) == "; ".join(
        f"{name}: there is no such setting; did you mean {right}?"
        for name, right in zip(wrong, meant, strict=True)
    )


def test_a_path_is_no_name_of_the_hub(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracegrad_trainer.cli.app import app

    with pytest.raises(SystemExit) as end:
        app(["serve", "--dry-run", "--model", "./nope", "--state-dir", str(tmp_path)])
    assert end.value.code == 2
    said = "trainer serve: model: nope: there is no such folder; give a Hugging Face model folder"
    assert capsys.readouterr().err.startswith(said)


def test_a_step_trains_a_model_of_the_hub(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its files are links into the cache, for the ranks' processes too."""
    from tracegrad_trainer.cli.app import app

    put_in_cache(cache, NAME, save_smallest_model(tmp_path / "model"), OLD)
    state = tmp_path / "state"
    settings = settings_of(tmp_path / "model", state)
    fill(settings.proxy.store.get_secret_value(), groups=2)
    given = settings.model_dump(mode="json", include={"batches", "optim", "fsdp"})
    sets = [f"--set={table}={_json(values)}" for table, values in given.items()]
    named = ["--model", NAME, "--state-dir", str(state)]
    with pytest.raises(SystemExit) as end:
        app(["step", *named, *sets], standalone_mode=True)
    assert end.value.code == 0, capfd.readouterr()
    put_in_cache(cache, NAME, tmp_path / "model", NEW)
    with pytest.raises(SystemExit) as end:
        app(["export", *named, *sets, "--out", str(tmp_path / "out")], standalone_mode=True)
    assert end.value.code == 0, capfd.readouterr()
    out = tmp_path / "out"
    assert (out / "tokenizer.json").is_file()
    assert not (out / "tokenizer.json").is_symlink()


def _json(values: object) -> str:
    from tracegrad.jsonutil import dump_json

    return dump_json(values)
