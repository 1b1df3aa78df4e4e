"""Settings from a file, flags and the environment, or as an earlier process wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tracegrad.chat.model_folder import HubName
from tracegrad.events import Json
from tracegrad.settings_sources import SettingsError, problems, read_toml
from tracegrad.urls import masked
from tracegrad_trainer.config.model_folders import FindModel
from tracegrad_trainer.config.trainer import SYNONYMS, PushedProxySettings, TrainerSettings
from tracegrad_trainer.losses import ObjectiveSettings
from tracegrad_trainer.losses.config import drop_unused as objective_without_unused


def load_settings(
    config: Path | None = None,
    overrides: list[str] | None = None,
    find_model: FindModel | None = None,
) -> TrainerSettings:
    """Settings from `config` (default: tracegrad.toml, if it is there) and `a.b=value` strings.
    `find_model`: of names on the Hub; None: the model is fetched.

    Raises SettingsError: one line a wrong setting.
    """
    file = _with_paths_from_its_folder(read_toml(config), config)
    flags: dict[str, Any] = {}
    for override in overrides or []:
        apply_override(flags, override)

    class Loaded(TrainerSettings):
        # Sources are a matter of the class; this one's file is known only now.
        @classmethod
        def file_values(cls) -> dict[str, Any]:
            return file

        @classmethod
        def find_model(cls, name: str, *, pinned_by: Path | None) -> Path:
            return (find_model or super().find_model)(name, pinned_by=pinned_by)

    try:
        return Loaded(**flags)
    except ValidationError as error:
        raise SettingsError("; ".join(problem_lines(error))) from None


def _with_paths_from_its_folder(file: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """A relative path of a model in a settings file counts from that file, wherever the command is
    run. Where nothing lies there it may be a name of the Hub, or a path from here."""
    if config is None:
        return file
    for table, name in ((file, "model"), (file, "reference"), (file.get("proxy"), "tokenizer")):
        if isinstance(table, dict) and isinstance(value := table.get(name), str):
            beside = config.parent / value
            elsewhere = Path(value).expanduser().exists() or HubName.parse(value) is not None
            if beside.exists() or not elsewhere:
                table[name] = str(beside.resolve())
    return file


def parse_resolved(text: str) -> TrainerSettings:
    """Settings as `model_dump_json` wrote them. Raises SettingsError, as `load`."""
    try:
        return TrainerSettings.model_validate_json(text)
    except ValidationError as error:
        raise SettingsError("; ".join(problem_lines(error))) from None


def without_unused(stored: Json) -> Json:
    """A step's settings less what its objective does not use: they were recorded before that was
    an error, or for another objective. What was no setting yet is as it was done then.

    Raises:
        ValidationError: the objective is none.
    """
    given = objective_without_unused(stored.get("objective", {}))
    objective = ObjectiveSettings.model_validate(given)
    batches, data = dict(stored.get("batches", {})), dict(stored.get("data", {}))
    if not objective.weighs_turns:
        batches.pop("stale", None)
    if batches.get("stale") != "weight":
        batches.pop("stale_decay", None)
    # A recorded batch is what it is, however its rollouts came.
    for name in ("refill", "in_flight", "over_sample", "over_sample_keep", "synchronous"):
        data.pop(name, None)
    if batches.get("stale") == "wait":
        batches["stale"] = "drop"
    optim = {"scale_by_groups": False} | stored.get("optim", {})
    found = stored | {"objective": given, "batches": batches, "data": data, "optim": optim}
    if "reference" not in objective.needs:
        found.pop("reference", None)
    return found


def problem_lines(error: ValidationError) -> list[str]:
    """A line for each wrong setting: its name, and what is wrong."""
    if error.title == PushedProxySettings.__name__:  # of the environment alone
        of_proxy = problems(error, PushedProxySettings)
        return [f"proxy.{name}: {problem}" for name, problem in of_proxy.items()]
    found = problems(error, TrainerSettings, SYNONYMS)
    for one in error.errors():
        name = ".".join(map(str, one["loc"]))
        if one["type"] == "missing":
            found[name] = f"is not set: write it into the settings file, or give --set {name}=VALUE"
        if one["type"] == "model_type":
            table, given = one["loc"][-1], masked(repr(one["input"]))
            found[name] = f"is a table of settings, not {given}: write [{table}] above them"
    if "model" in found:
        found.pop("vllm", None)  # it is missing only because the model is
    return [": ".join(filter(None, problem)) for problem in found.items()]


def apply_override(table: dict[str, Any], override: str) -> None:
    """`optim.lr=1e-4` into the nested table; the value is JSON where it reads as JSON.

    `data.tags=split=late` adds a tag to those of other overrides.

    Raises SettingsError.
    """
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise SettingsError(f"--set {override!r}: write it as table.name=value")
    *tables, leaf = name.split(".")
    for key in tables:
        if table.get(key) is None:  # null too: a table that was left out
            table[key] = {}
        table = table[key]
        if not isinstance(table, dict):
            raise SettingsError(f"--set {override!r}: {key} is not a table")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if name == "data.tags" and isinstance(value, str):
        key, equals, wanted = value.partition("=")
        if not (equals and key):
            raise SettingsError(f"--set {override!r}: write it as data.tags=key=value")
        # Each is one of them, as with `rollouts ls --tag`.
        value = {**(table.get(leaf) or {}), key: wanted}
    table[leaf] = value
