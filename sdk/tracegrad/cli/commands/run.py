"""`tracegrad run`: a command becomes a rollout or a group of them; a task file, a run."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tracegrad.call_check import question
from tracegrad.cli.commands.score import NO_PROXY
from tracegrad.cli.run_invocation import RunInvocation
from tracegrad.cli.store_option import USAGE_ERROR, JsonOption, fail
from tracegrad.context import proxy_url
from tracegrad.protocol import EVENTS_PATH
from tracegrad.runner.agent_install import InstallFailed
from tracegrad.runner.agent_launcher import AgentLauncher
from tracegrad.runner.ray_backend import RaySandboxes, RaySettings
from tracegrad.runner.run_record import new_run_folder
from tracegrad.runner.sandbox import SandboxBackend, SandboxSpec, SandboxUnavailable
from tracegrad.runner.sandbox_backend import (
    ContainerOptions,
    check_docker,
    check_engine,
    filled,
    sandbox_backend,
)
from tracegrad.runner.stage_limits import StageTimeouts
from tracegrad.runner.task import RewardSource, Task
from tracegrad.runner.task_files import TaskDefaults, TaskFileError, load_tasks
from tracegrad.runner.task_run import RunSettings
from tracegrad.transport import ProxyRefused, ProxyUnreachable, post_json

_FILE_CONCURRENCY, _FILE_RETRIES, _FILE_HEARTBEAT_S = 8, 2, 1800.0
_COMMAND_KEY = "tracegrad.run.command"


class RunCommand(TyperCommand):
    """What stands behind -- is the agent's command, whatever it looks like."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_COMMAND_KEY] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


def run_command(
    ctx: typer.Context,
    tasks: Annotated[
        Path | None,
        typer.Argument(
            metavar="TASKS",
            show_default=False,
            help="A file with a task a line (JSON), a Harbor task's folder, or a folder of those; "
            "with --agent also a prompt.",
        ),
    ] = None,
    attempts: Annotated[
        int, typer.Option("-n", "--attempts", min=1, help="Rollouts of each task: one group.")
    ] = 1,
    over_sample: Annotated[
        int, typer.Option(min=0, help="Attempts beyond them; the slowest are cut.")
    ] = 0,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Agents side by side, at most; default: 8, of a command all."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each task is a group.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--eval", help="Held-out rollouts: never trained, and never waiting.")
    ] = False,
    task: Annotated[
        str | None, typer.Option(help="A command's task id; else a hash of the command.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Whose recipe is run (`tracegrad agents`); of a command its name, else its first "
            "word."
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the agent of a recipe is asked.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="The model that an agent of a recipe asks for.")
    ] = "policy",
    tag: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="May be repeated.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="S", help="Seconds of each agent; 0, and by default: no bound."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="For the shell, after each attempt, where that ran."),
    ] = None,
    reward_from: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="exit_code: 1 for 0, 0 for 1; last_line: the number printed last."
        ),
    ] = "exit_code",
    workspace: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Each attempt runs in a copy of this folder."
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Each attempt runs in a container of this Docker image.")
    ] = None,
    build: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="The same; built from a Dockerfile here."),
    ] = None,
    cpus: Annotated[float | None, typer.Option(min=0.01, help="Of each container.")] = None,
    memory: Annotated[
        int | None, typer.Option(min=6, metavar="MIB", help="Of each sandbox.")
    ] = None,
    pids: Annotated[
        int | None, typer.Option(min=1, help="Processes and threads in each container.")
    ] = None,
    user: Annotated[
        str | None, typer.Option(metavar="UID:GID", help="Who runs commands in containers.")
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Containers can write to /tmp and their folder.")
    ] = False,
    mirror: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A package mirror that containers reach, too."),
    ] = None,
    warm: Annotated[
        int, typer.Option(min=0, help="Containers of each kind that are started ahead.")
    ] = 2,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Sandboxes on the hosts of this Ray cluster, of which this machine is one: auto,"
            " or host:port.",
        ),
    ] = None,
    ray_resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=AMOUNT",
            help="Of each sandbox, by Ray's names; may be repeated. Default: CPU=1.",
        ),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Replacements for each attempt that failed by no doing of the agent; default: 2, "
            "of a command none.",
        ),
    ] = None,
    heartbeat: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="S",
            help="Ends agents that print nothing and finish no LLM call for so long; 0: none; "
            "default: 1800, of a command none.",
        ),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(min=0, metavar="S", help="Seconds of each sandbox's start.")
    ] = 600.0,
    resume: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Go on with the run that has this folder of logs."
        ),
    ] = None,
    logs: Annotated[Path, typer.Option(help="A folder for runs' records and output.")] = Path(
        ".tracegrad/run"
    ),
    as_json: JsonOption = False,
) -> None:
    """Run a command, or the tasks of a file, as rollouts.

    Its LLM calls lead to the proxy at $TRACEGRAD_URL: OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the
    like, and keys, are in its environment. How it ends is the rollout's outcome. Waits for the
    trainer's pace, where one runs.
    """
    if reward_from not in ("exit_code", "last_line"):
        fail(f"--reward-from: {reward_from!r} is not exit_code or last_line", USAGE_ERROR)
    source: RewardSource = "last_line" if reward_from == "last_line" else "exit_code"
    command = tuple(ctx.meta.get(_COMMAND_KEY, ()))
    if ctx.args:
        fail(
            f"TASKS: {tasks}, and {ctx.args[0]}, too; put -- before a command, and a prompt in"
            " quotes",
            USAGE_ERROR,
        )
    if prompt is None and agent is not None and not command and _is_prompt(tasks):
        tasks, prompt = None, str(tasks)
    defaults = TaskDefaults(
        command=command or None,
        agent=agent,
        timeout_s=timeout or None,
        reward=reward,
        reward_source=source,
        workspace=workspace,
        image=image,
        tags=_tags(tag or []),
    )
    containers = SandboxSpec(
        image=image,
        build=build,
        cpus=cpus,
        memory_mb=memory,
        pids=pids,
        user=user,
        read_only=read_only,
        mirror=mirror,
    )
    of_file = tasks is not None
    found: Sequence[Task] = (
        [_one_task(defaults, task, prompt)] if tasks is None else _loaded(tasks, defaults)
    )
    found = _contained(found, containers)
    silent_s = (_FILE_HEARTBEAT_S if of_file else None) if heartbeat is None else heartbeat
    asked = RunSettings(
        attempts=attempts,
        over_sample=over_sample,
        concurrency=concurrency or (_FILE_CONCURRENCY if of_file else attempts + over_sample),
        epochs=epochs,
        retries=retries if retries is not None else _FILE_RETRIES if of_file else 0,
        held_out=held_out,
        timeouts=StageTimeouts(
            # On Ray a start may wait for a host: what comes after that is bounded there.
            start_s=(start_timeout or None) if ray is None else None,
            silent_s=silent_s or None,
        ),
    )
    resources = _amounts(ray_resource or [], ray)
    _check_proxy()
    if ray is None:
        _check_engine(found)
    with AgentLauncher(model=model) as launcher:
        found = _with_agents(found, launcher)
        backend = (
            _backend(found, launcher, warm, of_file=of_file)
            if ray is None
            else _ray_backend(found, ray, resources, start_timeout or None, asked.concurrency)
        )
        folder = resume or _new_folder(logs)
        invocation = RunInvocation(
            found, asked, folder, resume is not None, of_file, as_json, launcher, backend
        )
        raise typer.Exit(invocation.run())


def _new_folder(logs: Path) -> Path:
    try:
        return new_run_folder(logs)
    except OSError as error:
        fail(f"--logs: {error}", USAGE_ERROR)


def _is_prompt(given: Path | None) -> bool:
    """What is no path, and more than one word."""
    return given is not None and not os.path.exists(given) and len(str(given).split()) > 1


def _with_agents(tasks: Sequence[Task], launcher: AgentLauncher) -> list[Task]:
    """With the programs of their agents there."""
    try:
        found = [launcher.add(task, begins=_say_install) for task in tasks]
    except (ValueError, InstallFailed) as error:
        fail(str(error), USAGE_ERROR)
    for recipe in launcher.own_recipes:
        typer.echo(f"tracegrad: {recipe.name}: {recipe.path}", err=True)
    return found


def _say_install(what: str) -> None:
    typer.echo(f"tracegrad: installing {what}, once", err=True)


def _loaded(path: Path, defaults: TaskDefaults) -> list[Task]:
    if not os.path.exists(path):
        fail(
            f"TASKS: there is no {path}; put -- before a command, and --prompt before what an"
            " agent is asked",
            USAGE_ERROR,
        )
    try:
        return load_tasks(path, defaults)
    except TaskFileError as error:
        fail(str(error), USAGE_ERROR)


def _one_task(defaults: TaskDefaults, task_id: str | None, prompt: str | None) -> Task:
    command, agent = defaults.command, defaults.agent
    if command is None and (agent is None or prompt is None):
        fail(
            "CMD: there is none; give one behind --, --agent NAME and a prompt, or a file of tasks",
            USAGE_ERROR,
        )
    if defaults.reward is None and defaults.reward_source == "last_line":
        fail("--reward-from: there is no --reward", USAGE_ERROR)
    return Task(
        id=task_id or _hash(command or ("--agent", str(agent), str(prompt))),
        command=command,
        prompt=prompt,
        agent=agent or Path((command or ("",))[0]).name,
        sandbox=SandboxSpec(workspace=defaults.workspace),
        tags=defaults.tags or {},
        timeout_s=defaults.timeout_s,
        reward=defaults.reward,
        reward_source=defaults.reward_source or "exit_code",
    )


def _contained(tasks: Sequence[Task], asked: SandboxSpec) -> list[Task]:
    """Where they say nothing of their sandbox themselves, as the options do."""
    if asked.image is not None and asked.build is not None:
        fail("--build: there is --image, too; give one of them", USAGE_ERROR)
    try:
        found = [replace(task, sandbox=filled(task.sandbox, asked)) for task in tasks]
        check_docker(task.sandbox for task in found)
    except ValueError as error:
        fail(str(error), USAGE_ERROR)
    return found


def _hash(command: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*command]).encode()).hexdigest()[:16]


def _tags(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key:
            fail(f"--tag: {each!r} is not KEY=VALUE", USAGE_ERROR)
        found[key] = value
    return found


def _amounts(given: Sequence[str], ray: str | None) -> dict[str, float]:
    if given and ray is None:
        fail("--ray-resource: there is no --ray", USAGE_ERROR)
    found = {}
    for each in given:
        name, equals, amount = each.partition("=")
        try:
            found[name] = float(amount)
        except ValueError:
            equals = ""
        if not equals or not name or not 0 <= found[name] < math.inf:
            fail(f"--ray-resource: {each!r} is not NAME=AMOUNT", USAGE_ERROR)
    return found


def _backend(
    tasks: Sequence[Task], launcher: AgentLauncher, warm: int, *, of_file: bool
) -> SandboxBackend:
    return sandbox_backend(
        [task.sandbox for task in tasks],
        proxy=proxy_url(),
        options=ContainerOptions(warm=warm, layer=launcher.layer),
        shared=None if of_file else Path.cwd(),
    )


def _ray_backend(
    tasks: Sequence[Task],
    address: str,
    resources: Mapping[str, float],
    start_s: float | None,
    concurrency: int,
) -> SandboxBackend:
    """With the cluster joined."""
    settings = RaySettings(address=address, proxy=proxy_url(), resources=resources, start_s=start_s)
    backend = RaySandboxes(settings)
    try:
        room = backend.connect([task.sandbox for task in tasks])
    except ValueError as error:
        fail(str(error), USAGE_ERROR)
    if room < concurrency:
        typer.echo(
            f"tracegrad: the cluster has room for {room} of {concurrency} sandboxes (--concurrency)"
            " at once; the others wait",
            err=True,
        )
    return backend


def _check_engine(tasks: Sequence[Task]) -> None:
    """Before agents are installed for containers that cannot start."""
    try:
        check_engine(task.sandbox for task in tasks)
    except SandboxUnavailable as error:
        fail(str(error), NO_PROXY)


def _check_proxy() -> None:
    """Before an agent runs for nobody."""
    try:
        url = proxy_url()
        post_json(url, EVENTS_PATH, question([]), {})
    except (ProxyRefused, ValueError) as error:
        fail(str(error), USAGE_ERROR)
    except ProxyUnreachable as error:
        fail(f"no proxy at {url}: {error}; start `tracegrad proxy`, or set TRACEGRAD_URL", NO_PROXY)
