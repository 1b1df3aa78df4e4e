"""From a recipe to one attempt's command, environment and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest

from tracegrad.client_environ import client_variables
from tracegrad.runner.launch import (
    MAX_WORD_BYTES,
    LaunchValues,
    local_environ,
    make_launch,
    session_id,
)
from tracegrad.runner.recipe import Recipe

HOSTILE = 'say "hi" {api_key} \\ $HOME `id`\n\t--flag é 🙂 \x7f'
VALUES = LaunchValues(
    prompt=HOSTILE,
    model='a"b\\',
    base_url="http://127.0.0.1:1/rollouts/r/v1",
    api_key="tg-r",
    home="/h",
    workdir="/w",
    session_id="s",
)
RECIPE = Recipe(
    name="toy",
    version="1",
    dialect="chat",
    installer="none",
    command=("toy", "--model={model}", "{prompt}", "${HOME}", "{other}"),
    environ={
        "URLS": "{base_url} {root_url}",
        "OPENAI_API_KEY": "mine",
        "CONFIG": '{"{model}": ["{prompt}", 1, null]}',
    },
    files={
        ".toy/settings.json": '{"home": "{home}", "prompt": "{prompt}"}',
        ".toy/config.toml": 'model = "{model}"\nprompt = "{prompt}"\n[a]\nb = "{workdir}"\n',
        ".toy/{session_id}.txt": "{prompt}",
        "/etc/toy": "x",
    },
)


def test_every_text_gets_the_values_as_its_format_writes_them() -> None:
    launch = make_launch(RECIPE, VALUES)
    assert launch.command == ("toy", '--model=a"b\\', HOSTILE, "${HOME}", "{other}")
    assert launch.environ["URLS"] == f"{VALUES.base_url} http://127.0.0.1:1/rollouts/r"
    config = launch.environ["CONFIG"]
    assert config is not None
    assert json.loads(config) == {'a"b\\': [HOSTILE, 1, None]}
    assert json.loads(launch.files["/h/.toy/settings.json"]) == {"home": "/h", "prompt": HOSTILE}
    toml = tomllib.loads(launch.files["/h/.toy/config.toml"])
    assert toml == {"model": 'a"b\\', "prompt": HOSTILE, "a": {"b": "/w"}}
    assert launch.files["/h/.toy/s.txt"] == HOSTILE
    assert launch.files["/etc/toy"] == "x"


def test_the_same_for_the_same() -> None:
    assert make_launch(RECIPE, VALUES) == make_launch(RECIPE, VALUES)
    other = make_launch(RECIPE, replace(VALUES, home="/other"))
    assert {path for path in other.files if path.startswith("/h/")} == set()
    assert other.environ["HOME"] == "/other"
    assert "HOME" not in make_launch(replace(RECIPE, home=False), VALUES).environ


def test_addresses_and_keys_are_the_rollouts_and_the_recipe_goes_before_them() -> None:
    environ = make_launch(RECIPE, VALUES, environ={"OPENAI_BASE_URL": "elsewhere"}).environ
    clients = client_variables(VALUES.base_url, VALUES.api_key)
    assert {name: environ[name] for name in clients} == {**clients, "OPENAI_API_KEY": "mine"}


def test_a_process_beside_the_runner_sees_nothing_of_it_but_what_is_harmless() -> None:
    own = {
        "PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C", "AWS_SECRET": "x",
        "TRACEGRAD_API_KEY": "admin", "XDG_CONFIG_HOME": "/root/.config", "PIP_INDEX": "i",
    }  # fmt: skip
    changed = local_environ(
        replace(RECIPE, inherit=("PIP_INDEX",)), own, search_path=("/a", "/b"), temp="/t"
    )
    launch = make_launch(RECIPE, VALUES, environ=changed)
    found = {name: text for name, text in {**own, **launch.environ}.items() if text is not None}
    clients = {name for name, text in client_variables("u", "k").items() if text is not None}
    assert set(found) - clients - set(RECIPE.environ) == {
        "PATH", "HOME", "LANG", "PIP_INDEX", "TERM", "TMPDIR", "TMUX_TMPDIR",
    }  # fmt: skip
    assert found["PATH"] == "/a:/b:/usr/bin:/bin"
    assert found["HOME"] == "/h"
    assert found["TMPDIR"] == "/t"


def test_a_prompt_that_linux_does_not_take_is_said() -> None:
    recipe = replace(RECIPE, command=(sys.executable, "-c", "", "{prompt}"), environ={}, files={})
    most = MAX_WORD_BYTES - 1
    launch = make_launch(recipe, replace(VALUES, prompt="é" * (most // 2) + "x"))
    assert subprocess.run(launch.command, env=dict(os.environ), check=False).returncode == 0
    with pytest.raises(ValueError, match=r"toy: prompt: 131072 bytes .* file of the workspace"):
        make_launch(recipe, replace(VALUES, prompt="é" * (MAX_WORD_BYTES // 2)))
    with pytest.raises(ValueError, match=r"toy: prompt: it holds a zero character"):
        make_launch(recipe, replace(VALUES, prompt="a\0b"))


def test_a_session_is_a_uuid_of_the_rollout() -> None:
    assert session_id("0" * 31 + "1") == "00000000-0000-0000-0000-000000000001"
    assert session_id("attempt-1") == session_id("attempt-1") != session_id("attempt-2")
