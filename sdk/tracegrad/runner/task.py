"""What is asked of an agent: one task, however it was written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tracegrad.runner.sandbox import SandboxSpec

RewardSource = Literal["exit_code", "last_line", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """What is run in a sandbox for one attempt.

    Attributes:
        command: words; nothing is expanded.
        environ: on top of the addresses and keys; None: not to be set.
        files: written before it starts: path inside -> text.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task, and how an attempt at it is run and scored.

    Attributes:
        id: the group that its attempts are compared within.
        command: words that are run; None: those of `agent`'s recipe, with `prompt` in them.
        agent: a recipe's name (`runner/recipes`), or a name for `ls` where `command` is given.
        prompt: what the agent is asked, in words.
        sandbox: where it runs.
        environ: on top of the environment of the agent's command, and of the reward's.
        timeout_s: seconds of the agent's command; None: no bound.
        reward: a line for the shell that runs after the agent in the same sandbox; None: somebody
            else scores the rollout.
        reward_source: `exit_code`: 1 for 0, 0 for 1; `last_line`: the number that it prints last;
            `file`: what it wrote to `reward_file` (a number, or JSON with a `reward`).
        reward_timeout_s: seconds of the reward's command.
        reward_file: with `file`: a path inside of the sandbox, without its suffix: `.txt` or
            `.json`.
        reward_uploads: files that only the reward may see (path here -> path inside): they are
            copied in when the agent has ended.
        reward_environ: on top of the environment of the reward's command; the agent never has it.
        tags: of its rollouts.
    """

    id: str
    command: tuple[str, ...] | None = None
    agent: str | None = None
    prompt: str | None = None
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    environ: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    reward: str | None = None
    reward_source: RewardSource = "exit_code"
    reward_timeout_s: float = 300.0
    reward_file: str | None = None
    reward_uploads: Mapping[str, str] = field(default_factory=dict)
    reward_environ: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
