"""`kill -9` of `tracegrad run`: nothing of its agents is left, and the run goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support.engines.mock_engine import MockEngine
from support.proxy.proxy_with_engine import ProxyWithEngine, proxy_with_engine
from support.proxy.servers import EngineServer, eventually, serving
from support.runner.asking_agent import ASK
from tracegrad.runner import local_sandbox
from tracegrad.store import Store

TASKS, ATTEMPTS = 6, 2
# Leaves the process group and goes on, with the rollout's address in its environment.
WORK = '(setsid sleep 1000 &); echo $$ >> "$1"; sleep 0.3; shift; exec "$@"'


def living(pids: Path) -> list[str]:
    """Those of the agents' shells that are no zombies."""
    found = []
    for pid in pids.read_text().split() if pids.exists() else []:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] if state != "Z" else []
    return found


def marked(rollout_ids: set[str]) -> list[str]:
    """Processes that have the address of one of the rollouts."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = entry.read_text(errors="replace")
        except OSError:
            continue
        found += [entry.parent.name for name in rollout_ids if f"/rollouts/{name}/" in text]
    return found


def test_a_killed_runner_loses_what_was_under_way_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Store.open(f"sqlite:///{tmp_path}/store.db").close()
    server = EngineServer()
    with (
        serving(server, lifespan="off") as server.url,
        proxy_with_engine(server, MockEngine(), tmp_path / "store.db") as proxy,
    ):
        monkeypatch.setenv("TRACEGRAD_URL", proxy.url)
        monkeypatch.delenv("TRACEGRAD_API_KEY", raising=False)
        _killed_again_and_again(proxy, tmp_path)


def _killed_again_and_again(proxy: ProxyWithEngine, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = ["sh", "-c", WORK, "sh", str(pids), *ASK]
    tasks = [{"id": str(n), "command": command, "reward": "true"} for n in range(TASKS)]
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    run = [sys.executable, "-m", "tracegrad", "run", "tasks.jsonl", "-n", str(ATTEMPTS)]
    run += ["--concurrency", "2"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done, kills, resume = 0, 0, []
    while done < TASKS * ATTEMPTS // 2:
        with subprocess.Popen([*run, *resume], env=env, stdout=subprocess.DEVNULL) as process:
            record = eventually(_record, 60)
            _await_more(record, done + kills)
            process.send_signal(signal.SIGKILL)
        done, kills, resume = _ended(record), kills + 1, ["--resume", str(record.parent)]
    last = subprocess.run([*run, *resume], env=env, capture_output=True, text=True, timeout=300)
    assert last.returncode == 0, last.stderr
    begun, ended = _lines(record, "begun"), _lines(record, "ended")
    rows = eventually(lambda: _stored(proxy, len(begun)), 60)
    outcomes = Counter(str(row.outcome) for row in rows)
    assert len(ended) == TASKS * ATTEMPTS, "each of them once"
    assert set(outcomes) == {"completed", "aborted"}
    # One whose end was written to the journal and not to the record is made once more.
    assert TASKS * ATTEMPTS <= outcomes["completed"] <= TASKS * ATTEMPTS + kills
    finished = {row.rollout_id for row in rows if row.outcome == "completed"}
    assert ended <= finished
    assert all(row.reward == 1.0 for row in rows if row.rollout_id in ended)
    assert living(pids) == []
    assert marked(begun) == [], "what left the group is found by the next one"
    assert local_sandbox.remove_abandoned(tmp_path) == 0, "folders of killed runners are removed"


def _lines(record: Path, kind: str) -> set[str]:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {line[kind] for line in lines if kind in line}


def _record() -> Path | None:
    return next(Path(".tracegrad").rglob("record.jsonl"), None)


def _await_more(record: Path, than: int) -> None:
    eventually(lambda: _ended(record) > than, 60)


def _ended(record: Path) -> int:
    return record.read_text().count('"ended":')


def _stored(proxy: ProxyWithEngine, count: int) -> object:
    rows = proxy.store.rollouts(limit=None)
    return rows if len(rows) == count and all(row.outcome for row in rows) else None
