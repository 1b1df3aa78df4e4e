"""Files of tasks: what a line may say, and how each wrong one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tracegrad.runner.task_files import TaskDefaults, TaskFileError, load_tasks


def written(tmp_path: Path, *lines: dict[str, Any] | str) -> Path:
    path = tmp_path / "tasks.jsonl"
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_line_says_what_is_run_and_how_it_is_scored(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "hidden").mkdir()
    path = written(
        tmp_path,
        {
            "id": "a",
            "command": ["./agent", "x"],
            "workspace": "repo",
            "timeout": 5,
            "reward": "./check",
            "reward_file": "out/reward",
            "reward_uploads": {"hidden": "tests"},
            "tags": {"split": "train"},
            "memory_mb": 512,
        },
        "",
        {"prompt": "hello", "agent": "codex"},
    )
    one, other = load_tasks(path)
    assert (one.command, one.timeout_s, one.reward_source) == (("./agent", "x"), 5, "file")
    assert one.sandbox.workspace == tmp_path / "repo"
    assert one.sandbox.memory_mb == 512
    assert one.reward_uploads == {str(tmp_path / "hidden"): "tests"}
    assert (other.agent, other.prompt, other.command) == ("codex", "hello", None)
    assert other.id == load_tasks(path)[1].id, "a hash of the line"


def test_the_command_line_fills_in_what_lines_do_not_say(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"id": "a", "prompt": "say {task_id}"},
        {"id": "b", "command": ["own"], "reward": "own", "timeout": 1, "tags": {"split": "x"}},
    )
    defaults = TaskDefaults(
        command=("run", "--ask={prompt}", "{task_id}", "{other}"),
        reward="default",
        timeout_s=9,
        tags={"split": "train", "run": "1"},
    )
    one, other = load_tasks(path, defaults)
    assert one.command == ("run", "--ask=say {task_id}", "a", "{other}")
    assert (one.reward, one.timeout_s, one.agent) == ("default", 9, "run")
    assert (other.command, other.reward, other.timeout_s) == (("own",), "own", 1)
    assert other.tags == {"split": "x", "run": "1"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "a task is an object"),
        ({"command": ["x"], "comand": 1}, "comand: there is no such field; did you mean command?"),
        ({"command": "x y"}, "command: 'x y' is not a list of words"),
        ({"command": []}, "command: [] is not a list of words"),
        ({"command": ["x"], "timeout": 0}, "timeout: 0 is not a number above 0"),
        ({"command": ["x"], "timeout": "5"}, "timeout: '5' is not a number above 0"),
        ({"command": ["x"], "tags": {"a": 1}}, "tags: {'a': 1} is not texts by name"),
        ({"id": "", "command": ["x"]}, "id: '' is not a text"),
        ({"prompt": "x"}, "command: there is neither"),
        ({"agent": "codex"}, "prompt: an agent needs one"),
        ({"command": ["x"], "reward_from": "file", "reward": "y"}, "reward_file: reward_from"),
        ({"command": ["x"], "reward_file": "r"}, "reward: there is none"),
        ({"command": ["x"], "cpus": 1}, "cpus: needs image or build"),
        ({"command": ["x"], "workspace": "none"}, "workspace: "),
        ({"command": ["x"], "image": "a", "build": "."}, "image: there is build, too"),
        (
            {"command": ["x"], "reward": "y", "reward_file": "/logs/reward"},
            "leads out of the attempt's folder",
        ),
        (
            {"command": ["x"], "reward": "y", "reward_uploads": {"tasks.jsonl": "../x"}},
            "leads out of the attempt's folder",
        ),
        ({"id": "a\0b", "command": ["x"]}, r"id: 'a\x00b' holds a zero character"),
        ({"prompt": "\ud800", "command": ["x"]}, "half of a surrogate pair"),
        ({"command": ["x", "\0"]}, r"command: '\x00' holds a zero character"),
        ({"command": ["x"], "environ": {"A=B": "x"}}, "environ: 'A=B' is no name of a variable"),
        ({"command": ["x"], "environ": {"": "x"}}, "environ: '' is no name of a variable"),
        ({"command": ["x"], "environ": {"A": "\0"}}, r"environ: '\x00' holds a zero character"),
        *(
            (
                {"command": ["x"], "image": "i", "reward": "y", "reward_uploads": {".": target}},
                f"reward_uploads: '{target}' would be replaced as a whole",
            )
            for target in ("/", ".", "", "a/..", "/a/../..")
        ),
    ],
)
def test_each_wrong_line_is_named_with_its_number_and_field(
    tmp_path: Path, line: dict[str, Any] | str, said: str
) -> None:
    path = written(tmp_path, {"id": "fine", "command": ["x"]}, line, {"id": "fine", "prompt": "x"})
    with pytest.raises(TaskFileError) as error:
        load_tasks(path)
    first, second, *_ = str(error.value).splitlines()
    assert first.startswith(f"{path}:2: ")
    assert said in first
    assert second.startswith(f"{path}:3: command: "), "all are named, not the first alone"


def test_two_tasks_of_one_id_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, {"id": "a", "command": ["x"]}, {"id": "a", "command": ["y"]})
    with pytest.raises(TaskFileError, match=f"{path}:2: id: 'a' is the id of {path}:1, too"):
        load_tasks(path)


def test_a_file_of_something_else_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import os\nprint(os)\n")
    with pytest.raises(TaskFileError, match=r"before a command stands --$") as raised:
        load_tasks(tmp_path / "agent.py")
    assert "\n" not in str(raised.value)


def test_many_wrong_lines_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path, *[{"id": str(number)} for number in range(100)])
    with pytest.raises(TaskFileError) as error:
        load_tasks(path)
    assert len(str(error.value).splitlines()) == 21
    assert str(error.value).endswith("and 80 more")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_tasks_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(content)
    with pytest.raises(TaskFileError, match=r"tasks\.jsonl: "):
        load_tasks(tmp_path / "tasks.jsonl")


HARBOR = """
schema_version = "1.4"
[task]
name = "shop/fix-it"
description = "…"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
env = { KEY = "${TASKS_TEST_KEY}", OTHER = "${TASKS_TEST_NONE:-fallback}" }
[environment]
cpus = 2
memory_mb = 2048
storage_mb = 10240
workdir = "/app"
env = { MODE = "test" }
"""


def harbor(folder: Path, text: str = HARBOR) -> Path:
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "instruction.md").write_text("Fix it.\n")
    (folder / "task.toml").write_text(text)
    return folder


def test_a_harbor_task_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKS_TEST_KEY", "secret")
    folder = harbor(tmp_path / "one")
    for path in (folder, tmp_path):
        (task,) = load_tasks(path, TaskDefaults(agent="codex"))
        assert (task.id, task.prompt, task.agent) == ("shop/fix-it", "Fix it.\n", "codex")
        assert task.sandbox.build == folder / "environment"
        assert (task.sandbox.cpus, task.sandbox.memory_mb) == (2, 2048)
        assert (task.sandbox.workdir, task.environ) == ("/app", {"MODE": "test"})
        assert (task.timeout_s, task.reward_timeout_s) == (120, 60)
        assert task.reward_environ == {"KEY": "secret", "OTHER": "fallback"}
        assert (task.reward_source, task.reward_file) == ("file", "/logs/verifier/reward")
        assert task.reward_uploads == {str(folder / "tests"): "/tests"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("cpus = 2", "gpus = 1"), "environment.gpus: sandboxes have no GPU"),
        (("cpus = 2", "cpus = -1"), "environment.cpus: -1 is no number above 0"),
        (("[metadata]", "[[steps]]\nname = 'x'\n[metadata]"), "steps: tasks of several steps"),
        (("memory_mb = 2048", "memory = 'much'"), "environment.memory: 'much' is no size"),
        (("cpus = 2", "os = 'windows'"), "environment.os: Linux alone"),
        (("cpus = 2", "cpus = "), "task.toml: Invalid value"),
        (("${TASKS_TEST_KEY}", "${TASKS_TEST_NONE}"), "verifier.env.KEY: TASKS_TEST_NONE is not"),
        (("timeout_sec = 60.0", "user = 'root'"), "verifier.user: another one"),
    ],
)
def test_what_a_harbor_task_wants_and_is_not_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: tuple[str, str], said: str
) -> None:
    monkeypatch.setenv("TASKS_TEST_KEY", "secret")
    folder = harbor(tmp_path / "one", HARBOR.replace(*changed))
    harbor(tmp_path / "two", HARBOR.replace("shop/fix-it", "shop/other"))
    with pytest.raises(TaskFileError) as error:
        load_tasks(tmp_path, TaskDefaults(agent="codex"))
    assert str(error.value).startswith(f"{folder / 'task.toml'}: ")
    assert said in str(error.value)


def test_an_older_harbor_task_has_its_folders_name_and_memory_as_text(tmp_path: Path) -> None:
    text = '[environment]\nmemory = "2G"\ndocker_image = "python:3.12"\n'
    (task,) = load_tasks(harbor(tmp_path / "hello", text), TaskDefaults(agent="codex"))
    assert (task.id, task.sandbox.memory_mb) == ("hello", 2048)
    assert (task.sandbox.image, task.sandbox.build) == ("python:3.12", None)
