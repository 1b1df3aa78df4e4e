"""One run of a CLI agent: a home, a folder to work in, a proxy, and nothing else in the world."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.cli_agents.loopback import Loopback, loopback
from support.cli_agents.recipes import CACHE, MODEL, SECRET, TASK, Agent
from tracegrad.events import Turn
from tracegrad.runner.agent_install import InstalledAgent, install_agent
from tracegrad.runner.launch import LaunchValues, local_environ, make_launch, session_id
from tracegrad.store import Store
from tracegrad_trainer.utils.network import find_free_port
from tracegrad_trainer.utils.subprocesses import ChildProcess, is_responding

ROLLOUT = "this-run"
START_S = 60


@dataclass(frozen=True, slots=True)
class Run:
    """What the agent did, and what the store has of it, once the proxy has ended."""

    exit_code: int
    output: str
    work: Path
    proxy_log: str
    rollouts: list[str]
    turns: list[Turn]  # of ROLLOUT


def play(agent: Agent, upstream: str, folder: Path, *, timeout_s: float = 60) -> Run:
    """`agent` on its task, through a real proxy process, to the engine at `upstream`.

    AssertionError with the agent's words if it takes longer than `timeout_s`.
    """
    installed = install_agent(agent.recipe, CACHE)  # takes no time of the run's
    store = f"sqlite:///{folder}/store.db"
    log = folder / "proxy.log"
    with (
        proxy_process(upstream, store, log) as url,
        loopback() as inside,
        inside.relay(url) as seen,
    ):
        base_url = f"{seen}/rollouts/{ROLLOUT}/v1"
        code, output = _run(agent, installed, base_url, inside, folder, timeout_s)
    with Store.open(store, create=False) as opened:
        rollouts = [row.rollout_id for row in opened.rollouts(limit=None)]
        turns = opened.rollout_turns(ROLLOUT) if ROLLOUT in rollouts else []
    return Run(code, output, folder / "work", log.read_text(), rollouts, turns)


def _run(
    agent: Agent,
    installed: InstalledAgent,
    base_url: str,
    inside: Loopback,
    folder: Path,
    timeout_s: float,
) -> tuple[int, str]:
    """Exit code and words of one agent, in a home and a folder that are new."""
    home, work, temp = (folder / part for part in ("home", "work", "tmp"))
    for made in (home, work, temp):
        made.mkdir()
    values = LaunchValues(
        prompt=TASK,
        model=MODEL,
        base_url=base_url,
        api_key=SECRET,
        home=str(home),
        workdir=str(work),
        session_id=session_id(ROLLOUT),
    )
    own = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "SHELL": "/bin/bash"}
    changed = local_environ(agent.recipe, own, search_path=installed.search_path, temp=str(temp))
    launch = make_launch(agent.recipe, values, environ=changed)
    env = {**own, **launch.environ}
    for file, text in launch.files.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(text)
    log = folder / "agent.log"
    try:
        code = inside.run(
            launch.command,
            cwd=work,
            env={name: value for name, value in env.items() if value is not None},
            log=log,
            timeout_s=timeout_s,
        )
    except TimeoutError:
        words = log.read_text(errors="replace")[-3000:]
        raise AssertionError(f"{agent.name} does not end in {timeout_s} s: {words}") from None
    return code, log.read_text(errors="replace")


@contextmanager
def proxy_process(upstream: str, store: str, log: Path) -> Iterator[str]:
    """`tracegrad proxy` as a process of its own; its URL."""
    port = find_free_port()
    command = [sys.executable, "-m", "tracegrad.cli", "proxy", f"--port={port}"]
    command += [f"--model={MODEL}", f"--upstream={upstream}", f"--store={store}"]
    proxy = ChildProcess("proxy", command, log=log)
    proxy.start()
    try:
        url = f"http://127.0.0.1:{port}"
        proxy.wait_until_ready(lambda: is_responding(f"{url}/healthz"), timeout_s=START_S)
        yield url
    finally:
        proxy.stop()
