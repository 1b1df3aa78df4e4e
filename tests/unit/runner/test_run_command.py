"""`tracegrad run` with agents that are commands: their calls, outcomes and rewards in the store."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.asking_agent import ASK, SOURCE, TRACED
from tracegrad.cli.app import app
from tracegrad.store import RolloutSummary

DOWN: tuple[int, dict[str, Any], dict[str, str]] = (503, {"error": {"message": "down"}}, {})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def rollouts(proxy: ProxyWithEngine, count: int) -> list[RolloutSummary]:
    def ended() -> list[RolloutSummary] | None:
        rows = proxy.store.rollouts(limit=None)
        return rows if len(rows) == count and all(row.outcome for row in rows) else None

    found: list[RolloutSummary] = eventually(ended, 60)
    return found


def test_one_command_is_a_rollout_with_its_calls_and_its_reward(proxy: ProxyWithEngine) -> None:
    result = run("--task", "hello", "--reward", "test -s answer.txt", "--", *ASK)
    assert result.exit_code == 0, result.output
    (only,) = rollouts(proxy, 1)
    assert (only.task_id, only.outcome, only.reward) == ("hello", "completed", 1.0)
    assert len(proxy.turns_of(only.rollout_id)) == 1
    assert "completed  reward 1  1 calls" in result.stdout
    log = next(Path(".tracegrad/run").rglob("agent.log"))
    assert (log.parent.name, log.read_text()) == (only.rollout_id, "asked\n")


def test_attempts_are_a_group_and_each_has_its_copy_of_the_workspace(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "answer.txt").write_text("before ")
    reward = "test $(grep -c before answer.txt) = 1 && wc -c < answer.txt"
    given = ["-n", "3", "--workspace", str(workspace), "--reward-from", "last_line"]
    result = run(*given, "--json", "--tag", "split=train", "--reward", reward, "--", *ASK)
    assert result.exit_code == 0, result.output
    rows = rollouts(proxy, 3)
    assert len({row.task_id for row in rows}) == 1, "a hash of the command"
    assert {row.tags["split"] for row in rows} == {"train"}
    said = [json.loads(line) for line in result.stdout.splitlines()]
    assert {one["rollout_id"]: one["reward"] for one in said} == {
        row.rollout_id: row.reward for row in rows
    }
    assert all(one["reward"] > len("before ") for one in said)
    assert (workspace / "answer.txt").read_text() == "before "


@pytest.mark.parametrize(
    ("command", "code", "outcome", "why"),
    [
        ("exit 3", 3, "env_error", "before any LLM call"),
        (f"{shlex.join(ASK)}; exit 3", 3, "agent_error", "exit code 3: asked"),
        ("sleep 1000", 124, "infra_error", "without one LLM call"),
    ],
)
def test_ends_are_outcomes(
    proxy: ProxyWithEngine, command: str, code: int, outcome: str, why: str
) -> None:
    timeout = ["--timeout", "1"] if "sleep" in command else []
    result = run(*timeout, "--reward", "true", "--", "sh", "-c", command)
    assert result.exit_code == code, result.output
    (only,) = rollouts(proxy, 1)
    assert only.outcome == outcome
    assert why in result.stdout
    assert only.reward == (1.0 if outcome == "agent_error" else None)


def test_an_agent_asks_no_proxy_of_the_environments_for_this_machine(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("NO_PROXY", "own.example")
    monkeypatch.delenv("no_proxy", raising=False)
    result = run("--", *ASK)
    assert result.exit_code == 0, result.output
    (only,) = rollouts(proxy, 1)
    assert len(proxy.turns_of(only.rollout_id)) == 1


def test_what_an_agent_opens_itself_is_held_out_with_it(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent of @trace that is evaluated as a command."""
    monkeypatch.setenv("ASK", SOURCE)
    result = run("--eval", "--", *TRACED)
    assert result.exit_code == 0, result.output
    rows = rollouts(proxy, 2)
    assert {(row.task_id == "its own", row.turns) for row in rows} == {(True, 1), (False, 0)}
    assert {row.held_out for row in rows} == {True}


def test_what_an_agent_prints_does_not_drive_the_terminal(proxy: ProxyWithEngine) -> None:
    command = ["sh", "-c", r"printf 'no\033]0;title\007 tool\rcompleted\n'; exit 3"]
    result = run("-n", "2", "--", *command)
    assert "exit code 3: no\ufffd]0;title\ufffd tool" in result.stdout
    assert {"\033", "\007", "\r"}.isdisjoint(result.stdout)


def test_an_engine_that_fails_is_not_the_policys_doing(proxy: ProxyWithEngine) -> None:
    proxy.engine.failure = DOWN
    result = run("--reward", "exit 1", "--", *ASK)
    assert "failed on the serving side" in result.stdout
    (only,) = rollouts(proxy, 1)
    assert (only.outcome, only.reward) == ("infra_error", None)


def test_nor_is_one_that_fails_after_an_answer(proxy: ProxyWithEngine) -> None:
    def fail() -> None:
        eventually(Path("asked").exists, 60)
        proxy.engine.failure = DOWN
        Path("failing").touch()

    ask = shlex.join(ASK)
    waits = f"{ask} && touch asked && until test -e failing; do sleep 0.1; done; {ask}"
    failing = Thread(target=fail)
    failing.start()
    result = run("--reward", "exit 1", "--", "sh", "-c", waits)
    failing.join()
    assert "infra_error  reward unknown  1 calls" in result.stdout


def test_a_scorer_that_fails_is_not_the_policys_doing(proxy: ProxyWithEngine) -> None:
    result = run("--reward", "echo no verifier; exit 7", "--", *ASK)
    assert "reward: the command ended with exit code 7" in result.stdout
    (only,) = rollouts(proxy, 1)
    assert (only.outcome, only.reward) == ("env_error", None)


def test_a_command_that_is_not_there_is_said(proxy: ProxyWithEngine) -> None:
    result = run("--", "no-such-agent", "--its-own-option")
    assert result.exit_code == 127
    assert "no-such-agent: No such file or directory" in result.stdout


def test_without_a_proxy_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACEGRAD_URL", "http://127.0.0.1:9")
    result = run("--", "touch", "ran")
    assert result.exit_code == 3
    assert "no proxy at http://127.0.0.1:9" in result.stderr
    assert not Path("ran").exists()


def test_an_address_that_is_not_the_proxys_is_said(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACEGRAD_URL", proxy.engine_url)
    result = run("--", "true")
    assert result.exit_code == 2
    assert f"{proxy.engine_url} has no /api/events: it is no tracegrad proxy" in result.stderr


def test_without_an_engine_no_container_is_tried(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each attempt would fail, be made again, and be kept as a rollout."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    result = run("--image", "a", "--", "true")
    assert result.exit_code == 3
    assert "no Docker engine at unix:///nowhere/docker.sock: start one" in result.stderr
    assert proxy.store.rollouts(limit=None) == []


def test_a_folder_that_does_not_come_is_no_timeout(
    proxy: ProxyWithEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    result = run("--workspace", ".", "--", "true")
    assert "infra_error" in result.stdout
    assert result.exit_code == 127


def test_no_bound_of_the_time_is_none(proxy: ProxyWithEngine) -> None:
    result = run("--timeout", "0", "--", *ASK)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tag", "train", "--", "true"], "--tag"),
        (["--reward-from", "stdout", "--", "true"], "--reward-from"),
        (["-n", "0", "--", "true"], "-n"),
        ([], "CMD"),
        (["python", "agent.py", "-v"], "-v"),
        (["python", "agent.py"], "TASKS: python, and agent.py, too; put -- before a command"),
        (["--reward-from", "last_line", "--", "true"], "--reward-from: there is no --reward"),
    ],
)
def test_wrong_use_names_the_option(arguments: list[str], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_agents_and_aborts_their_rollouts(
    proxy: ProxyWithEngine, tmp_path: Path, how: signal.Signals
) -> None:
    """SIGHUP: as where the terminal is closed, or its connection lost."""
    command = [sys.executable, "-m", "tracegrad", "run", "-n", "2", "--"]
    command += ["sh", "-c", "echo $$ >> pids; sleep 1000"]
    env = {**os.environ, "TRACEGRAD_URL": proxy.url}
    with subprocess.Popen(command, env=env) as process:
        pids = Path("pids")
        eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, 60)
        process.send_signal(how)
        assert process.wait(60) == 130
    assert {row.outcome for row in rollouts(proxy, 2)} == {"aborted"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())
