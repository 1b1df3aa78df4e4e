"""`tracegrad run tasks.jsonl`: groups, epochs, replacements, cuts, resume; in the store and on the
screen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from support.proxy.proxy_with_engine import ProxyWithEngine
from support.proxy.servers import eventually
from support.runner.asking_agent import ASK
from tracegrad.cli.app import app
from tracegrad.runner import quarantine_watch
from tracegrad.runner.quarantine import Verdict
from tracegrad.runner.quarantine_watch import QuarantineWatch
from tracegrad.store import RolloutSummary


def tasks_file(*lines: dict[str, Any]) -> str:
    Path("tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "tasks.jsonl"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments])


def ended(proxy: ProxyWithEngine, count: int) -> list[RolloutSummary]:
    def found() -> list[RolloutSummary] | None:
        rows = proxy.store.rollouts(limit=None)
        return rows if len(rows) == count and all(row.outcome for row in rows) else None

    rows: list[RolloutSummary] = eventually(found, 60)
    return rows


def test_each_task_is_a_group_in_each_epoch_with_rewards_from_files(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "check").write_text("test -s ../answer.txt && echo 0.75")
    spec = {
        "command": [*ASK],
        "reward": "cd tests && sh check > ../out/reward.txt",
        "reward_file": "out/reward",
        "reward_uploads": {str(tmp_path / "hidden"): "tests"},
    }
    # What the agent leaves where the reward is read, or where its tests are, is not believed.
    cheat = "mkdir -p out tests; echo 1 > out/reward.json; echo 'echo 1' > tests/check; "
    cheating = {**spec, "command": ["sh", "-c", f'{cheat} exec "$0" "$@"', *ASK]}
    path = tasks_file({"id": "a", **spec}, {"id": "b", **cheating})
    result = run(path, "-n", "2", "--epochs", "2", "--json", "--tag", "split=train")
    assert result.exit_code == 0, result.output
    rows = ended(proxy, 8)
    assert Counter(row.task_id for row in rows) == {"a": 4, "b": 4}
    assert {row.reward for row in rows} == {0.75}
    assert {row.tags["split"] for row in rows} == {"train"}
    said = [json.loads(line) for line in result.stdout.splitlines()]
    assert Counter(one["epoch"] for one in said) == {0: 4, 1: 4}
    assert all(set(one["seconds"]) >= {"sandbox", "agent", "reward", "queue"} for one in said)


def test_a_reward_that_cannot_be_cleared_is_none(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    """As where an agent that is not root closes the folder in which it wrote it."""
    (tmp_path / "rm").write_text("#!/bin/sh\necho rm: Permission denied >&2; exit 1\n")
    (tmp_path / "rm").chmod(0o755)
    cheat = 'mkdir -p out; echo 777 > out/reward.txt; exec "$0" "$@"'
    path = tasks_file(
        {
            "id": "a",
            "command": ["sh", "-c", cheat, *ASK],
            "environ": {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            "reward": "echo 0 > out/reward.txt",
            "reward_file": "out/reward",
        }
    )
    result = run(path, "--retries", "0")
    assert "its file could not be cleared before: rm: Permission denied" in result.stdout
    (only,) = ended(proxy, 1)
    assert (only.outcome, only.reward) == ("env_error", None)


def test_failures_are_replaced_and_what_does_not_come_right_is_said(
    proxy: ProxyWithEngine, tmp_path: Path
) -> None:
    """One fails before its first call, once; the other always."""
    once = f'mkdir {tmp_path}/first 2>/dev/null && exit 3; exec "$0" "$@"'
    path = tasks_file(
        {"id": "shaky", "command": ["sh", "-c", once, *ASK]},
        {"id": "broken", "command": ["no-such-agent"]},
    )
    result = run(path, "--concurrency", "2")
    assert result.exit_code == 1, "a group is not filled"
    outcomes = Counter((row.task_id, str(row.outcome)) for row in ended(proxy, 5))
    assert outcomes == {
        ("shaky", "env_error"): 1,
        ("shaky", "completed"): 1,
        ("broken", "env_error"): 3,
    }
    assert "no-such-agent: No such file or directory" in result.stdout
    assert "4 not the agent's doing, and not scored" in result.stdout


def test_what_breaks_is_left_out_of_the_epochs_to_come_and_of_runs_to_come(
    proxy: ProxyWithEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is asked while the run goes on; a held-out run makes all tasks."""
    gate, count = tmp_path / "gate", tmp_path / "count"
    take = QuarantineWatch._take

    def take_and_open(watch: QuarantineWatch, verdicts: Sequence[Verdict]) -> None:
        take(watch, verdicts)
        if watch.why("broken") is not None:
            gate.touch()

    monkeypatch.setattr(QuarantineWatch, "_take", take_and_open)
    monkeypatch.setattr(quarantine_watch, "LOOK_S", 0.1)
    # By then eight attempts at the other task have failed.
    waits = f"""
echo >> {count}
while [ $(wc -l < {count}) -ge 10 ] && ! [ -e {gate} ]; do sleep 0.1; done
exec "$0" "$@" """
    path = tasks_file(
        {"id": "broken", "command": ["no-such-agent"]},
        {"id": "good", "command": ["sh", "-c", waits, *ASK]},
    )
    options = ("--concurrency", "1", "--retries", "0", "--reward", "true")
    result = run(path, "--epochs", "14", *options)
    assert result.output.count("left out: task broken is quarantined (rule:fails): the last") == 1
    outcomes = Counter((row.task_id, str(row.outcome)) for row in proxy.store.rollouts(limit=None))
    assert outcomes["good", "completed"] == 14
    assert 8 <= outcomes["broken", "env_error"] < 13
    assert f"\n{outcomes.total()}/{outcomes.total()}  completed" in result.stdout
    again = run(path, *options)
    assert again.exit_code == 0, again.output
    assert "left out: task broken" in again.output
    assert "1 rollouts" in again.stdout
    assert "2 rollouts" in run(path, "--eval", *options).stdout


def test_the_slowest_of_a_group_is_cut(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    slow = f'mkdir {tmp_path}/first 2>/dev/null && sleep 1000; exec "$0" "$@"'
    path = tasks_file({"id": "a", "command": ["sh", "-c", slow, *ASK]})
    result = run(path, "-n", "2", "--over-sample", "1", "--reward", "true")
    assert result.exit_code == 0, result.output
    outcomes = Counter(str(row.outcome) for row in ended(proxy, 3))
    assert outcomes == {"completed": 2, "aborted": 1}
    assert "pass@1 1, pass@2 1; 1 aborted" in result.stdout


def test_an_agent_that_hangs_is_ended_and_one_that_works_is_not(proxy: ProxyWithEngine) -> None:
    path = tasks_file(
        {"id": "deaf", "command": ["sleep", "1000"]},
        {"id": "hangs", "command": ["sh", "-c", '"$0" "$@"; sleep 1000', *ASK]},
        {"id": "prints", "command": ["sh", "-c", "for i in 1 2 3 4 5 6; do echo; sleep 1; done"]},
    )
    result = run(path, "--heartbeat", "3", "--retries", "0")
    outcomes = {row.task_id: str(row.outcome) for row in ended(proxy, 3)}
    assert outcomes == {"deaf": "infra_error", "hangs": "budget", "prints": "completed"}
    assert "printed nothing and made no LLM call for 3 s" in result.stdout


def test_an_interrupted_run_goes_on_where_it_was(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    """By Ctrl-C: what was under way is made again, what had ended is not."""
    gate = tmp_path / "gate"
    waits = f'test $1 = 1 || while ! test -e {gate}; do sleep 0.1; done; shift; exec "$@"'
    path = tasks_file(
        *({"id": str(n), "command": ["sh", "-c", waits, "sh", str(n), *ASK]} for n in (1, 2, 3))
    )
    command = [sys.executable, "-m", "tracegrad", "run", path, "--concurrency", "3"]
    env = {**os.environ, "TRACEGRAD_URL": proxy.url}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        eventually(lambda: any(row.outcome for row in proxy.store.rollouts(limit=None)), 60)
        (record,) = Path(".tracegrad/run").glob("*/record.jsonl")
        eventually(lambda: record.read_text().count('"begun"') == 3, 60)
        process.send_signal(signal.SIGINT)
        assert f"--resume {record.parent}" in process.stderr.read()
        assert process.wait(60) == 130
    gate.touch()
    result = run(path, "--concurrency", "3", "--resume", str(record.parent))
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[:2]] == ["2/3", "3/3"]
    rows = Counter((row.task_id, str(row.outcome)) for row in ended(proxy, 5))
    assert rows == {(str(n), "completed"): 1 for n in (1, 2, 3)} | {
        (str(n), "aborted"): 1 for n in (2, 3)
    }
    again = run(path, "--concurrency", "3", "--resume", str(record.parent))
    assert again.exit_code == 0, again.output
    ended(proxy, 5)  # nothing was left to do
    other = run(path, "-n", "2", "--resume", str(record.parent))
    assert other.exit_code == 2
    assert "attempts was 1 and is 2 now" in other.stderr
    other = run(path, "--reward", "true", "--resume", str(record.parent))
    assert other.exit_code == 2
    assert re.search("tasks was .* and is .* now", other.stderr)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.jsonl"], "there is no none.jsonl; put -- before a command"),
        (["wrong.jsonl"], "wrong.jsonl:1: comand: there is no such field"),
    ],
)
def test_wrong_tasks_are_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong.jsonl").write_text('{"comand": ["x"]}\n')
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_what_stands_behind_two_dashes_is_the_command_of_each_task(proxy: ProxyWithEngine) -> None:
    path = tasks_file({"id": "a", "prompt": "--json"}, {"id": "b", "prompt": "x y"})
    result = run(path, "--", "sh", "-c", 'echo "$1:$2"', "sh", "{task_id}", "{prompt}")
    assert result.exit_code == 0, result.output
    ended(proxy, 2)
    logs = {log.read_text() for log in Path(".tracegrad/run").rglob("agent.log")}
    assert logs == {"a:--json\n", "b:x y\n"}
