"""Every setting is described, `trainer settings` writes a file that is read back unchanged, and the
page and the recipes are those of the code."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from tracegrad.environment import INTERNAL_VARIABLES, PROGRAM_VARIABLES, SDK_VARIABLES
from tracegrad.inspect.step_metrics import find_metric
from tracegrad.proxy.cli import proxy_command
from tracegrad.proxy.config import ProxySettings
from tracegrad.settings_sources import SettingsError
from tracegrad_trainer.cli.app import app
from tracegrad_trainer.config.loading import load_settings
from tracegrad_trainer.config.reference import settings_tables
from tracegrad_trainer.config.settings_file import (
    default_settings_file,
    effective_settings_file,
    toml_value,
)
from tracegrad_trainer.config.trainer import TrainerSettings

ROOT = Path(__file__).resolve().parents[4]
OPTIONAL = {table.name for table in settings_tables() if table.optional}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TRACEGRAD_STORE", "TRACEGRAD_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts" / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def uncommented(text: str) -> str:
    """All defaults as settings, but those of tables that are left out."""
    lines, off = [], False
    for line in text.splitlines():
        if match := re.match(r"#?\[([a-z.]+)\]$", line):
            off = match[1] in OPTIONAL and line.startswith("#")
        lines.append(line if off else re.sub(r"^#(?=[a-z_]+ = )", "", line))
    return "\n".join(lines)


def written(folder: Path, text: str, name: str = "written.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def resolved(settings: TrainerSettings) -> dict[str, Any]:
    return settings.stored()


def test_the_page_is_what_the_settings_say() -> None:
    page = script()
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run scripts/settings_page.py"


def test_everything_that_can_be_set_is_described() -> None:
    tables = [*settings_tables(), *settings_tables(ProxySettings, "proxy")]
    assert [table.name for table in tables if not table.what] == []
    bare = [table.path(one) for table in tables for one in table.settings if not one.what]
    assert bare == []
    assert sum(len(table.settings) for table in settings_tables()) > 130


def test_every_option_of_the_commands_is_described() -> None:
    proxy = typer.Typer(add_completion=False)
    proxy.command()(proxy_command)
    commands: list[Any] = [typer.main.get_command(proxy)]
    commands += typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    assert len(commands) > 6
    bare = [
        f"{command.name} {option.name}"
        for command in commands
        for option in command.params
        if option.name != "help" and not getattr(option, "help", None)
    ]
    assert bare == []
    options = {option.name for option in commands[0].params}
    settings = options - {"fd"}  # a socket that is open is of one process alone
    assert set(script().PROXY_OPTIONS) == settings, "those that the page names"


def test_every_variable_of_the_environment_is_described() -> None:
    sources = [*(ROOT / "sdk").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]
    named = {
        name
        for path in sources
        if path.name != "environment.py"
        for name in re.findall(r"\"(TRACEGRAD_[A-Z_]+|VLLM_API_KEY)\"", path.read_text())
    }
    prefixes = ("TRACEGRAD_PROXY_", "TRACEGRAD_TRAINER_")
    own = {name for name in named if not name.startswith(prefixes)}
    assert own == {*SDK_VARIABLES, *PROGRAM_VARIABLES, *INTERNAL_VARIABLES}


def test_the_file_of_defaults_is_read_back_as_the_defaults(model: Path, tmp_path: Path) -> None:
    text = default_settings_file()
    for table in settings_tables():
        for one in table.settings:
            assert re.search(rf"^#? ?{one.name} =", text, re.M), table.path(one)
    flags = [f"model={model}"]
    plain = resolved(load_settings(written(tmp_path, "", "empty.toml"), flags))
    assert resolved(load_settings(written(tmp_path, text), flags)) == plain
    everything = uncommented(text)
    assert tomllib.loads(everything)["objective"]["clip_low"] == 0.2
    assert resolved(load_settings(written(tmp_path, everything), flags)) == plain


GIVEN = """
state_dir = "here"
max_steps = 7
[objective]
preset = "gspo"
[optim]
lr = 2e-5
max_grad_norm = inf
eps = 1e-8
betas = [0.9, 0.99]
[batches]
outcomes = ["completed"]
group_size = 4
[data.tags]
"a b" = "ö\\"\\u007f"
[fsdp.lora]
rank = 8
[proxy]
control_key = "0123456789abcdef0"
port = 5151
[vllm]
extra_args = ["--gpu-memory-utilization", "0.5"]
"""


def test_what_a_file_comes_to_is_read_back_unchanged(model: Path, tmp_path: Path) -> None:
    flags = [f"model={model}", "data.refill=true"]
    given = written(tmp_path, GIVEN, "given.toml")
    wanted = load_settings(given, flags)
    text = effective_settings_file(given, flags)
    found = load_settings(written(tmp_path, text))
    assert resolved(found) == resolved(wanted)
    assert found.data.tags == {"a b": 'ö"\x7f'}
    lines = text.splitlines()
    assert "lr = 2e-05  # changed; default: 1e-06" in lines
    assert "max_grad_norm = inf  # changed; default: 1.0" in lines
    assert "eps = 1e-08" in lines, "given, and as the default"
    assert "refill = true  # changed; default: none" in lines
    assert '#ratio = "sequence"  # as resolved here' in lines, "of the preset"
    assert "#max_wait_s = 900" in lines, "neither given nor changed"
    assert "[fsdp.lora]" in lines
    assert "0123456789abcdef0" not in text
    assert "# control_key = is given, and not written here" in lines
    again = load_settings(written(tmp_path, text), ["objective.preset=grpo"])
    assert again.objective.ratio == "token", "a preset still fills what it is about"


def test_what_toml_cannot_say_is_said(model: Path) -> None:
    text = effective_settings_file(None, [f"model={model}", "batches.max_staleness=null"])
    said = "# max_staleness = none; TOML has no word for it: --set batches.max_staleness=null"
    assert said in text.splitlines()


def test_the_environment_counts_as_given(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAD_TRAINER_OPTIM__LR", "3e-6")
    monkeypatch.setenv("TRACEGRAD_PROXY_PORT", "4999")
    monkeypatch.setenv("TRACEGRAD_STORE", "postgresql://me:secret@db/traces")
    text = effective_settings_file(None, [f"model={model}"])
    lines = text.splitlines()
    assert "lr = 3e-06  # changed; default: 1e-06" in lines
    assert "port = 4999  # changed; default: 4141" in lines
    [store] = [line for line in lines if line.startswith("store =")]
    assert store.startswith('store = "postgresql://me:***@db/traces"')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[optim]\nlr = -1\n", "optim.lr: Input should be greater than or equal to 0"),
        ("[optim\n", "wrong.toml: "),
        ("[objective]\npreset = 'grop'\n", "unknown preset 'grop'"),
    ],
)
def test_a_wrong_file_is_the_usual_error(
    model: Path, tmp_path: Path, text: str, words: str
) -> None:
    path = written(tmp_path, text, "wrong.toml")
    with pytest.raises(SettingsError, match=re.escape(words)):
        effective_settings_file(path, [f"model={model}"])


def test_the_command_prints_it(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tracegrad_trainer", "settings", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    assert run().stdout == default_settings_file()
    wrong = run("--settings", "none.toml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "trainer settings: none.toml: there is no such settings file\n"


def test_values_as_toml() -> None:
    values = [True, 1, 2.5, 1e-6, float("inf"), 'a"b\n', Path("x"), [1, [2]], {"k": "v"}, {}]
    for value in values:
        read = tomllib.loads(f"x = {toml_value(value)}")["x"]
        assert read == (str(value) if isinstance(value, Path) else value)
    assert toml_value(None) is None


RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_read_and_the_page_says_what_is_in_it(recipe: Path, model: Path) -> None:
    found = load_settings(recipe, [f"model={model}"])
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| [{recipe.stem}]")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    batches, lora = found.batches, found.fsdp.lora
    assert cells[2] == ("full" if lora is None else f"LoRA, rank {lora.rank}")
    assert float(cells[3]) == found.optim.lr
    assert cells[4] == f"{batches.groups} x {batches.group_size}"
    assert int(cells[5]) == found.vllm.max_model_len <= batches.row_limit
    assert "not run on a GPU" in recipe.read_text(encoding="utf-8")


def test_there_is_a_recipe_for_each_size() -> None:
    assert [path.stem for path in RECIPES] == [
        "qwen2.5-0.5b",
        "qwen3-0.6b",
        "qwen3-1.7b",
        "qwen3-8b-lora",
    ]


def test_the_page_names_metrics_that_there_are() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    watched = page.split("## What to watch")[1].split("##")[0]
    names = re.findall(r"^\| `([a-z0-9_/]+)`", watched, re.M)
    assert len(names) > 8
    assert [name for name in names if find_metric(name) is None] == []
