"""`tracegrad run --agent`: an agent that its user describes in a file of ten lines, for real."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from support.engines.mock_engine import MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, serving
from tracegrad.cli.app import app
from tracegrad.runner import recipe_files
from tracegrad.runner.recipe import Recipe
from tracegrad.runner.recipe_files import load_recipe
from tracegrad.store import Store

# What a vendor would ship: it reads its address from a file below HOME, asks once, and says what it
# has found there.
PROGRAM = """#!{python}
import json, os, sys, urllib.request
settings = json.load(open(os.path.expanduser("~/.toy/settings.json")))
task, = sys.argv[1:]
body = json.dumps({{"model": settings["model"], "messages": [{{"role": "user", "content": task}}]}})
request = urllib.request.Request(
    settings["url"] + "/chat/completions",
    body.encode(),
    {{"Content-Type": "application/json", "Authorization": "Bearer " + settings["key"]}},
)
json.load(urllib.request.urlopen(request))
home = os.path.expanduser("~")
told = {{"home": home, "before": sorted(os.listdir(home)), "task": task,
        "temp": os.environ["TMPDIR"], "secret": os.environ.get("SECRET"), "cwd": os.getcwd()}}
open(os.path.join(home, "left"), "w").close()
print("told " + json.dumps(told))
"""
RECIPE = """
name = "toy"
version = "1.0"
dialect = "chat"
installer = "shell"
shell = ["cp {program} bin/toy", "chmod +x bin/toy"]
command = ["toy", "{{prompt}}"]
needs = ["sh"]

[files.".toy/settings.json"]
url = "{{base_url}}"
key = "{{api_key}}"
model = "{{model}}"
"""
TASK = 'say "hi" to {home}, at once'


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyWithEngine]:
    Store.open(f"sqlite:///{tmp_path}/store.db").close()
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), tmp_path / "store.db") as found,
    ):
        monkeypatch.setenv("TRACEGRAD_URL", found.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("SECRET", "of the user's")
        monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
        (tmp_path / "temp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
        (tmp_path / "here" / ".tracegrad" / "recipes").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "here")
        program = tmp_path / "program"
        program.write_text(PROGRAM.format(python=sys.executable))
        text = RECIPE.format(program=shlex.quote(str(program)))
        (tmp_path / "here" / ".tracegrad" / "recipes" / "toy.toml").write_text(text)
        yield found
        found.close_clients()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", "--logs", "logs", *arguments])


def told() -> list[dict[str, str]]:
    logs = sorted(Path("logs").rglob("agent.log"))
    return [json.loads(log.read_text().rpartition("told ")[2]) for log in logs]


def test_attempts_of_an_agent_of_ones_own(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    done = run("--agent", "toy", "-n", "2", "--reward", "true", TASK)
    assert done.exit_code == 0, done.output
    assert done.output.count("installing toy@1.0, once") == 1
    assert done.output.count("toy: .tracegrad/recipes/toy.toml") == 1  # it is not one of ours
    first, second = told()
    assert first["task"] == second["task"] == TASK
    assert first["home"] != second["home"]
    assert first["temp"] != second["temp"]
    for one in (first, second):
        assert one["before"] == [".toy"]  # nothing of another attempt
        assert one["secret"] is None
        assert one["cwd"] == str(tmp_path / "here")
        assert not Path(one["home"]).exists()
    assert not [*(tmp_path / "temp").iterdir()]
    rows = proxy.store.rollouts(limit=None)
    assert {(row.agent, row.outcome, row.reward, row.turns) for row in rows} == {
        ("toy", "completed", 1.0, 1)
    }
    assert len({row.task_id for row in rows}) == 1


def test_it_is_not_installed_again_and_may_be_named_by_its_file(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    assert run("--agent", "toy", TASK).exit_code == 0
    (tmp_path / "program").unlink()
    again = run("--agent", "./.tracegrad/recipes/toy.toml", "--prompt", "word")
    assert again.exit_code == 0, again.output
    assert "installing" not in again.output
    assert [one["task"] for one in told()] == [TASK, "word"]


def test_the_tasks_of_a_file(proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their recipe's file is read once."""
    read: list[Path] = []

    def load(path: Path, version: str | None = None) -> Recipe:
        read.append(path)
        return load_recipe(path, version)

    monkeypatch.setattr(recipe_files, "load_recipe", load)
    lines = [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two", "agent": "toy"}]
    Path("tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = run("--agent", "toy", "tasks.jsonl")
    assert done.exit_code == 0, done.output
    assert {one["task"] for one in told()} == {"one", "two"}
    assert read == [Path(".tracegrad/recipes/toy.toml")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--agent", "tyo", TASK), "tyo: there is no recipe of that name; did you mean toy?"),
        (("--agent", "toy", "tasks.jsnl"), "TASKS: there is no tasks.jsnl; put -- before a comm"),
        (("--agent", "toy"), "CMD: there is none; give one behind --, --agent NAME and a prompt"),
        (("--agent", "toy", "x " * 80_000), "toy: prompt: 160000 bytes in one word"),
        (("--agent", "bad", TASK), "bad.toml: dialect: 'http' cannot be one; write one of"),
        (("--agent", "broken", TASK), "broken@1.0 could not be installed: no luck. All that was"),
        (("--agent", "lacking", TASK), "lacking: needs no-such-program, which is not here"),
        (("--agent", "nothing", TASK), "command: there is no program 'nothing'; install it"),
    ],
)
def test_what_cannot_run_is_told_before_any_rollout(
    arguments: tuple[str, ...], said: str, proxy: ProxyWithEngine
) -> None:
    recipes = Path(".tracegrad/recipes")
    text = (recipes / "toy.toml").read_text()
    changes = {
        "bad": ('"chat"', '"http"'),
        "broken": ('"chmod +x bin/toy"', '"echo no luck; exit 1"'),
        "lacking": ('"sh"', '"no-such-program"'),
        "nothing": ('"toy", "{prompt}"', '"nothing", "{prompt}"'),
    }
    for name, change in changes.items():
        own = text.replace('"toy"', f'"{name}"', 1).replace(*change)
        (recipes / f"{name}.toml").write_text(own)
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert proxy.store.rollouts(limit=None) == []


def test_a_name_without_a_recipe_is_a_commands_name(proxy: ProxyWithEngine) -> None:
    assert run("--agent", "mine", "--", "true").exit_code == 0
    [row] = proxy.store.rollouts(limit=None)
    assert row.agent == "mine"
