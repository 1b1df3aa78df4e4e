"""How each CLI agent is started, headless, against one endpoint; and the script it is played.

All are the published packages as they are. What is set here is where the model is, that
nobody will answer questions, and what keeps their prompts small or their hands off the net.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from support.cli_agents.install import PINS, Npm, Package, Pip
from support.cli_agents.scripted_engine import Script
from support.engines.mock_engine import Answer

MODEL = "policy"
TASK = "Create a file hello.txt in the current folder that contains the word hi, and look at it."
SECRET = "sk-secret-of-this-test"  # the key that agents send; nothing may keep it


@dataclass(frozen=True, slots=True)
class Launch:
    """`files` are written under the home folder first."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    name: str
    package: Package
    dialect: str
    launch: Callable[[str], Launch]  # of the endpoint's URL, without /v1
    script: Script


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


# --- mini-swe-agent: chat completions, no stream, one tool ---------------------------------


def _mini(url: str) -> Launch:
    return Launch(
        ["mini", "-y", "--exit-immediately", f"--model=openai/{MODEL}", f"--task={TASK}"],
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": SECRET,
            "OPENAI_API_BASE": f"{url}/v1",
        },
    )


# --- Qwen Code: chat completions, streamed -------------------------------------------------


def _qwen(url: str) -> Launch:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
    }
    return Launch(
        ["qwen", "--auth-type", "openai", "--yolo", "-p", TASK],
        {
            "OPENAI_API_KEY": SECRET,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_MODEL": MODEL,
        },
        {".qwen/settings.json": json.dumps(settings)},
    )


# --- OpenCode: chat completions, streamed --------------------------------------------------


def _opencode(url: str) -> Launch:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": SECRET},
        "models": {MODEL: {"limit": {"context": 65536, "output": 4096}}},
    }
    config = {
        "model": f"here/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"*": "allow"},
        "provider": {"here": provider},
    }
    return Launch(
        ["opencode", "run", "--format", "json", TASK],
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_CONFIG_CONTENT": json.dumps(config)},
    )


# --- Codex: responses, streamed ------------------------------------------------------------


def _codex(url: str) -> Launch:
    config = f"""\
model = "{MODEL}"
model_provider = "here"
web_search = "disabled"
check_for_update_on_startup = false

[analytics]
enabled = false

[features]
plugins = false
goals = false

[agents]
enabled = false

[model_providers.here]
name = "here"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    return Launch(
        [
            "codex",
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            TASK,
        ],
        {"OPENAI_API_KEY": SECRET},
        {".codex/config.toml": config},
    )


# --- Claude Code: messages, streamed -------------------------------------------------------


def _claude(url: str) -> Launch:
    return Launch(
        [
            "claude",
            "--permission-mode=bypassPermissions",
            "--tools=Bash,Edit,Write,Read",
            f"--model={MODEL}",
            "--print",
            TASK,
        ],
        {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": SECRET,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # else it refuses to work as root without asking
        },
    )


# --- Gemini CLI: generateContent, streamed -------------------------------------------------


def _gemini(url: str) -> Launch:
    # It would cut the tail of the distribution off, and such turns are not trained.
    sampling = {"generateContentConfig": {"topP": 1, "topK": 0}}
    settings = {
        "modelConfigs": {"customOverrides": [{"match": {"model": MODEL}, "modelConfig": sampling}]},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return Launch(
        ["gemini", "-m", MODEL, "--approval-mode", "yolo", "-p", TASK],
        {
            "GEMINI_API_KEY": SECRET,
            "GOOGLE_GEMINI_BASE_URL": url,
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        {".gemini/settings.json": json.dumps(settings)},
    )


# mini-swe-agent is the last one: others offer a tool "bash" too.
AGENTS = {
    agent.name: agent
    for agent in [
        Agent(
            "codex",
            Npm("codex", "0.169.0"),
            "responses",
            _codex,
            script("exec_command", "exec_command", command="cmd"),
        ),
        Agent(
            "claude-code",
            Npm("claude-code", "2.1.329"),
            "messages",
            _claude,
            script("Bash", "Bash", description="Runs it"),
        ),
        Agent(
            "qwen-code",
            Npm("qwen-code", "0.24.4"),
            "chat",
            _qwen,
            script("notebook_edit", "run_shell_command", is_background=False),
        ),
        Agent(
            "opencode",
            Npm("opencode", "1.18.33"),
            "chat",
            _opencode,
            script("todowrite", "bash", description="Runs it"),
        ),
        Agent(
            "gemini-cli",
            Npm("gemini-cli", "0.61.0"),
            "gemini",
            _gemini,
            script("google_web_search", "run_shell_command"),
        ),
        Agent(
            "mini-swe-agent",
            Pip("mini-swe-agent", "2.4.6", PINS / "mini-swe-agent.txt"),
            "chat",
            _mini,
            script("bash", "bash", last="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
    ]
}
