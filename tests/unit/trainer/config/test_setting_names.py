"""Names of settings that are not quite right, and values that a command line spells its own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracegrad.settings_sources import SettingsError, setting_names
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.trainer import SYNONYMS, TrainerSettings


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("optim.learning_rate=1e-5", "optim.lr"),  # another trainer's word
        ("lr=1e-5", "optim.lr"),  # without its table
        ("batches.clip_high=0.3", "objective.clip_high"),  # in another table
        ("optim.warmup_step=3", "optim.warmup_steps"),  # misspelt
        ("optm.lr=1e-5", "optim.lr"),
        ("optm.lrr=1e-5", "optim"),
        ("fsdp.lora.rnk=4", "fsdp.lora.rank"),
        ("proxy.upstrem=http://127.0.0.1:1", "proxy.upstream"),
        ("vllm.max_len=64", "vllm.max_model_len"),
    ],
)
def test_the_setting_that_was_meant_is_named(wrong: str, meant: str, model: Path) -> None:
    name = wrong.partition("=")[0]
    with pytest.raises(SettingsError) as error:
        load_settings(None, [f"model={model}", f"state_dir={model}", wrong])
    if name.startswith("optm"):  # the table is what is not there
        name, meant = "optm", "optim"
    assert str(error.value) == f"{name}: there is no such setting; did you mean {meant}?"


def test_a_name_like_no_other_is_only_refused(model: Path) -> None:
    with pytest.raises(SettingsError, match=r"^optim\.zzz: there is no such setting$"):
        load_settings(None, [f"model={model}", f"state_dir={model}", "optim.zzz=1"])


def test_every_synonym_stands_for_a_setting_and_is_none() -> None:
    known = set(setting_names(TrainerSettings))
    assert {"optim.lr", "fsdp.lora.rank", "proxy.anchors.group_size", "vllm.port"} <= known
    assert set(SYNONYMS.values()) <= known
    assert not set(SYNONYMS) & {name.rpartition(".")[2] for name in known}


@pytest.mark.parametrize(
    ("given", "tags"),
    [
        (["data.tags=split=late"], {"split": "late"}),
        (["data.tags=split=late", "data.tags=kind=a=b"], {"split": "late", "kind": "a=b"}),
        (['data.tags={"split": "late"}'], {"split": "late"}),
        (["data.tags.split=early", "data.tags=split=late"], {"split": "late"}),
        (["data.tags=year=2026"], {"year": "2026"}),
    ],
)
def test_tags_are_read_as_people_write_them(
    given: list[str], tags: dict[str, str], model: Path
) -> None:
    settings = load_settings(None, [f"model={model}", f"state_dir={model}", *given])
    assert settings.data.tags == tags


def test_a_tag_without_a_value_says_how_to_write_it(model: Path) -> None:
    with pytest.raises(SettingsError, match=r"'data\.tags=late': write it as data\.tags=key=value"):
        load_settings(None, [f"model={model}", f"state_dir={model}", "data.tags=late"])


def test_models_of_a_settings_file_lie_beside_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "conf"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "mine").symlink_to(model)
    file = folder / "run.toml"
    file.write_text(
        'model = "models/mine"\nreference = "models/mine"\nobjective = {kl = "k3"}\n'
        '[proxy]\ntokenizer = "models/mine"\n'
    )
    monkeypatch.chdir(tmp_path)
    settings = load_settings(file, [f"state_dir={tmp_path}"])
    assert settings.model == settings.reference == settings.proxy.tokenizer == model
    assert settings.vllm.model == str(model)
    # On the command line it is a path of the shell's.
    (tmp_path / "here").symlink_to(model)
    assert load_settings(file, [f"state_dir={tmp_path}", "model=here"]).vllm.model == str(model)
    file.write_text('model = "./models/other"')
    with pytest.raises(
        SettingsError, match=rf"^model: {folder}/models/other: there is no such folder"
    ):
        load_settings(file, [f"state_dir={tmp_path}"])


def test_weights_that_are_not_all_there_are_named(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_text("{}")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(SettingsError, match=r"lacks 1 of its files of weights, such as model-2\."):
        load_settings(None, [f"model={tmp_path}", f"state_dir={tmp_path}"])
