"""One trial of Harbor's as one rollout: its agent calls the rollout's address, in our sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict
from urllib.parse import urlsplit

from harbor.agents.base import BaseAgent
from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent
from harbor.models.agent.name import AgentName
from harbor.models.task.task import Task
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.trial.trial import Trial

from tracegrad.client_environ import client_variables
from tracegrad.context import Rollout
from tracegrad.decorators import rollout
from tracegrad.events import Outcome
from tracegrad.runner.attempt import calls_of
from tracegrad.runner.outcomes import Classified, serving_failure
from tracegrad.runner.recipe import Recipe
from tracegrad.runner.sandbox import (
    BrokenEnvironment,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxSpec,
)
from tracegrad_integrations.harbor.environment import (
    IMPORT_PATH,
    environments_of,
    sandbox_spec,
)
from tracegrad_integrations.harbor.outcomes import classify_trial, reward_of

# Whose clients want an address without /v1.
_ROOT_URL_PROVIDERS = ("anthropic", "gemini", "google")
# They run on this machine, and need no model.
_WITHOUT_MODEL = ("oracle", "nop")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """What all trials of a run share.

    Attributes:
        agent: Harbor's name of one that takes a base URL (`harbor run --agent`).
        model: `provider/name`; the provider says which dialect the agent speaks.
        backend: where the tasks' containers come from.
        trials: Harbor's folder for what it writes: logs, results.
        recipe: the agent that the backend bakes into the image; None: the image has it.
        agent_options: of Harbor's agent, such as `{"max_turns": 20}`.
        tags: of the rollouts.
    """

    agent: str
    model: str
    backend: SandboxBackend
    trials: Path
    recipe: Recipe | None = None
    agent_options: Mapping[str, Any] = MappingProxyType({})
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """`result` None: it did not come to be Harbor's."""

    rollout_id: str
    outcome: Outcome
    reason: str | None
    reward: float | None
    result: TrialResult | None


async def run_trial(folder: Path, settings: TrialSettings) -> FinishedTrial:
    """The task in `folder`, once. The group is the task's name.

    Raises ValueError before anything runs: an agent that takes no base URL, or that leaves
    programs running between its commands. A cancellation ends the trial, and the rollout as
    aborted.
    """
    check_agent(settings.agent)
    task = Task(folder)
    spec = sandbox_spec(task.config.environment, task.paths.environment_dir, settings.recipe)
    with rollout(
        task.name, tags=settings.tags, agent=settings.agent, input=task.instruction
    ) as own:
        return await _trial(folder, spec, settings, own)


def trial_agent(settings: TrialSettings) -> Callable[[TrialTask, Rollout], Awaitable[None]]:
    """Harbor's agent for `tracegrad.run(agent, train=trial_tasks(folder), name=settings.agent)`,
    which makes groups of trials at the trainer's pace, again what failed by no doing of the agent,
    and goes on where it was interrupted. `settings.tags` are `run`'s there. Raises ValueError: as
    of `run_trial`."""
    check_agent(settings.agent)

    async def play(task: TrialTask, rollout: Rollout) -> None:
        folder = Path(task["folder"])
        config = Task(folder)
        spec = sandbox_spec(
            config.config.environment, config.paths.environment_dir, settings.recipe
        )
        await _trial(folder, spec, settings, rollout)

    return play


class TrialTask(TypedDict):
    """What `trial_agent` is called with. `id`: the task's name, of which a group is made."""

    id: str
    instruction: str
    folder: str


def trial_tasks(*folders: Path) -> list[TrialTask]:
    """Of tasks' folders, and of folders of those. Raises ValueError: there is none."""
    found = []
    for folder in folders:
        inside = [folder] if (folder / "task.toml").exists() else sorted(folder.iterdir())
        tasks = [Task(each) for each in inside if (each / "task.toml").exists()]
        if not tasks:
            raise ValueError(f"{folder}: there is no task.toml, nor in a folder in it")
        found += [
            TrialTask(id=each.name, instruction=each.instruction, folder=str(each.paths.task_dir))
            for each in tasks
        ]
    return found


async def _trial(
    folder: Path, spec: SandboxSpec, settings: TrialSettings, own: Rollout
) -> FinishedTrial:
    try:
        sandbox = await settings.backend.start(spec)
    except SandboxError as error:
        broken = isinstance(error, BrokenEnvironment)
        outcome = Outcome.ENV_ERROR if broken else Outcome.INFRA_ERROR
        return _finished(own, Classified(outcome, f"sandbox: {error}"), None, None)
    try:
        result = await _run(folder, settings, own, sandbox)
    except asyncio.CancelledError:
        own.finish(Outcome.ABORTED, "interrupted")
        raise
    finally:
        await sandbox.close()
    rewards = None if result.verifier_result is None else result.verifier_result.rewards
    failures = [(each.exception_type, each.exception_message)
                for each in result.recorded_exceptions()]  # fmt: skip
    reward = reward_of(rewards)
    calls, serving = None, None
    if settings.agent not in _WITHOUT_MODEL:
        made = await asyncio.to_thread(calls_of, own)
        calls = None if made is None else made.count
        serving = serving_failure(made)
    found = classify_trial(failures[0] if failures else None, calls, reward, serving)
    return _finished(own, found, reward if found.outcome.scored else None, result)


def _finished(
    own: Rollout, found: Classified, reward: float | None, result: TrialResult | None
) -> FinishedTrial:
    if reward is not None:
        own.reward(reward)
    own.finish(found.outcome, found.reason)
    return FinishedTrial(
        rollout_id=own.id,
        outcome=found.outcome,
        reason=found.reason,
        reward=reward,
        result=result,
    )


async def _run(
    folder: Path, settings: TrialSettings, own: Rollout, sandbox: Sandbox
) -> TrialResult:
    url = sandbox.reachable(own.base_url)
    host = urlsplit(url).hostname or ""
    config = TrialConfig(
        task=TaskConfig(path=folder),
        trial_name=own.id,  # where its files are
        trials_dir=settings.trials,
        agent=agent_config(settings, url, own.api_key),
        environment=EnvironmentConfig(import_path=IMPORT_PATH, kwargs={"sandbox": own.id}),
    )
    with environments_of(own.id, settings.backend, sandbox, host=host, recipe=settings.recipe):
        trial = await Trial.create(config)
        return await trial.run()


def agent_config(settings: TrialSettings, base_url: str, api_key: str) -> AgentConfig:
    """`base_url`: as the agent sees it, with /v1."""
    if settings.agent in _WITHOUT_MODEL:
        return AgentConfig(name=settings.agent)
    provider = settings.model.partition("/")[0]
    url = base_url.removesuffix("/v1") if provider in _ROOT_URL_PROVIDERS else base_url
    keys = {
        name: value
        for name, value in client_variables(base_url, api_key).items()
        if value is not None and name.endswith("_KEY")
    }
    # It has been baked in; nothing is installed for a rollout.
    options: dict[str, Any] = {"skip_install": True}
    kind = AgentFactory.get_agent_class(AgentName(settings.agent))
    if kind.capabilities.native_web_tools:
        options["disable_web_search"] = True  # runs at the vendor's, and the proxy refuses it
    return AgentConfig(
        name=settings.agent,
        model_name=settings.model,
        base_url=url,
        env=keys,
        kwargs={**options, **settings.agent_options},
    )


def check_agent(name: str) -> None:
    """Raises ValueError."""
    if name in _WITHOUT_MODEL:
        return
    known = {agent.value for agent in AgentName}
    if name not in known:
        raise ValueError(f"agent: Harbor has none of the name {name!r}; `harbor run --help`")
    kind: type[BaseAgent] = AgentFactory.get_agent_class(AgentName(name))
    if not kind.capabilities.base_url:
        raise ValueError(f"agent: {name} takes no base URL: its calls cannot lead to the proxy")
    if not issubclass(kind, BaseInstalledAgent):
        raise ValueError(
            f"agent: {name} keeps a terminal between its commands, and here what a command leaves"
            " running ends with it; take one that is one command, such as mini-swe-agent"
        )
