"""Whether what deploy/ starts is what our programs take: flags, variables, settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import typer
from torch.distributed.run import get_args_parser

from support.docs.blocks import DOCS
from tracegrad.cli.app import app as tracegrad_app
from tracegrad.environment import unread_variables
from tracegrad.proxy.config import ProxySettings
from tracegrad.settings_sources import setting_names, unknown_variables
from tracegrad_trainer.cli.app import app as trainer_app
from tracegrad_trainer.config.trainer import TrainerSettings

_OURS = {"tracegrad": tracegrad_app, "trainer": trainer_app}
_PREFIX = "TRACEGRAD_TRAINER_"


def parsed(program: str, arguments: Sequence[str]) -> dict[str, object]:
    """The options of a command of `tracegrad` or `trainer`, as it reads them; nothing is run.

    Raises click.UsageError: it does not take them.
    """
    group = typer.main.get_command(_OURS[program])
    name, *rest = arguments
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, list(rest), resilient_parsing=False)
    found: dict[str, object] = context.params
    return found


def torchrun_options(arguments: Sequence[str]) -> dict[str, object]:
    """Raises SystemExit: torchrun does not take them."""
    parser = get_args_parser()
    return vars(parser.parse_args([*arguments, "-m", "program"]))


def unknown(environment: Mapping[str, str]) -> Iterator[str]:
    """What our programs would say of variables that none of them reads."""
    yield from unread_variables(environment)
    yield from unknown_variables(ProxySettings, environment)
    yield from unknown_variables(TrainerSettings, environment)
    known = set(setting_names(TrainerSettings))
    for variable in environment:
        if variable.startswith(_PREFIX):
            setting = variable.removeprefix(_PREFIX).lower().replace("__", ".")
            if setting not in known:
                yield f"{variable}: there is no setting {setting}"


def attached_engine_flags() -> dict[str, str | None]:
    """vLLM's options in docs/attach.md: tests/integration/test_two_hosts.py starts it with them."""
    page = (DOCS / "attach.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- test: vllm -->\n```sh\n(.*?)```", page, re.S)
    assert block is not None
    words = re.findall(r"'[^']*'|\S+", block[1].replace("\\\n", " "))
    return flags([word.strip("'") for word in words[words.index("--model") :]])


def flags(words: Sequence[str]) -> dict[str, str | None]:
    """`--name value`, `--name=value` and `--name`, by name."""
    found: dict[str, str | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            found[name] = value if equals else None
        else:
            found[next(reversed(found))] = word
    return found
