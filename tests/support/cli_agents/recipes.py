"""The shipped recipes as the tests run them, and the script that each agent is played."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from support.cli_agents.scripted_engine import Script
from support.engines.mock_engine import Answer
from tracegrad.runner.recipe import Recipe
from tracegrad.runner.recipe_files import find_recipe

MODEL = "policy"
# It begins like an option, and holds what recipes and files must not take for their own.
TASK = '- Create a file "hello.txt" in the folder with the word hi, and look at it: {home}, $HOME.'
SECRET = "sk-secret-of-this-test"  # the key that agents send; nothing may keep it
# Agents are installed once for a checkout.
CACHE = Path(__file__).resolve().parents[3] / ".cache" / "agents"


@dataclass(frozen=True, slots=True)
class Agent:
    recipe: Recipe
    script: Script

    @property
    def name(self) -> str:
        return self.recipe.name


def script(
    mark: str,
    shell: str,
    command: str = "command",
    last: str | None = None,
    **others: object,
) -> Script:
    """Writes the file; reads it and looks around, in parallel; says that it is done.

    All with the agent's tool `shell`, which takes the line as `command` and also `others`;
    `last` is a line that the agent wants to see at the end. `mark` is a tool that no agent but
    this one offers, and to its main thread alone.
    """

    def run(line: str) -> tuple[str, str]:
        # Spelled as JavaScript spells JSON; Python would put spaces in.
        return shell, json.dumps({command: line, **others}, separators=(",", ":"))

    return Script(
        tool=mark,
        steps=[
            Answer("I will write the file.", tool_calls=[run("printf hi > hello.txt")]),
            Answer("", tool_calls=[run("cat hello.txt"), run("ls")]),
            Answer("The file hello.txt says hi.", tool_calls=[run(last)] if last else []),
        ],
    )


def trimmed(name: str, *options: str) -> Recipe:
    """The shipped recipe, with more options behind its program's name."""
    recipe = find_recipe(name, Path("nowhere"))
    program, *words = recipe.command
    return replace(recipe, command=(program, *options, *words))


# mini-swe-agent is the last one: others offer a tool "bash" too.
AGENTS = {
    agent.name: agent
    for agent in [
        Agent(trimmed("codex"), script("exec_command", "exec_command", command="cmd")),
        Agent(
            # Half the prompt, for a vLLM on two cores.
            trimmed("claude-code", "--tools=Bash,Edit,Write,Read"),
            script("Bash", "Bash", description="Runs it"),
        ),
        Agent(
            trimmed("qwen-code"),
            script("notebook_edit", "run_shell_command", is_background=False),
        ),
        Agent(trimmed("opencode"), script("todowrite", "bash", description="Runs it")),
        Agent(trimmed("gemini-cli"), script("google_web_search", "run_shell_command")),
        Agent(
            trimmed("mini-swe-agent"),
            script("bash", "bash", last="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
    ]
}
