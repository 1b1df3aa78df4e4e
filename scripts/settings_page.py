"""docs/settings.md, made of the settings classes: `python scripts/settings_page.py`.

`tests/unit/trainer/config/test_settings_page.py` fails where the page is another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tracegrad.environment import PROGRAM_VARIABLES, SDK_VARIABLES, Variable
from tracegrad.proxy.config import ProxySettings
from tracegrad_trainer.config.reference import Setting, Table, settings_tables
from tracegrad_trainer.config.settings_file import toml_value

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"

INTRODUCTION = """\
# Settings

This page is made of the settings classes by `scripts/settings_page.py`; change those.

```sh
trainer settings > tracegrad.toml            # every setting, at its default and commented out
trainer settings --settings tracegrad.toml   # what a file comes to; what it changes is marked
```

Both print TOML that `trainer serve`, `trainer step` and `trainer sft` read. Settings come from
`--set TABLE.NAME=VALUE`, then the environment (`TRACEGRAD_TRAINER_TABLE__NAME`, such as
`TRACEGRAD_TRAINER_OPTIM__LR`), then the file: `--config FILE`, or `tracegrad.toml` of the
working directory. What is printed as a comment follows from the preset or from other settings, and
goes on doing so. Keys and passwords are never printed: give them by the environment.

[recipes.md](recipes.md) has files to start with, [training.md](training.md) and
[objectives.md](objectives.md) say what the settings do together.
"""

PROXY = """\
## `[proxy]`

What `tracegrad proxy` needs to know. It reads this table of `tracegrad.toml`; `trainer serve`
starts a proxy with it. Each is also a variable, `TRACEGRAD_PROXY_<NAME>` in capitals (the store:
`TRACEGRAD_STORE`, the admin key: `TRACEGRAD_API_KEY`), and these are options of the command:
OPTIONS.
"""

ENVIRONMENT = """\
## The environment

Of an agent's process, which `import tracegrad` reads:

SDK
Of the programs:

PROGRAMS
A variable whose name begins with `TRACEGRAD_` and that nothing reads is named in a warning, with
the one that was probably meant: by every command, and with the first rollout of an agent's process;
those of settings (`TRACEGRAD_PROXY_`, `TRACEGRAD_TRAINER_`) by the commands that read these
settings. It keeps nothing from starting.
"""

# Options of `tracegrad proxy`.
PROXY_OPTIONS = (
    "upstream",
    "upstream_kind",
    "store",
    "model",
    "tokenizer",
    "redact",
    "host",
    "port",
    "workers",
)


def page() -> str:
    tables = list(settings_tables())
    parts = [INTRODUCTION]
    for table in sorted(tables, key=lambda table: table.name.startswith("proxy")):
        parts.append(_section(table))
    environment = ENVIRONMENT.replace("SDK\n", _variables(SDK_VARIABLES))
    parts.append(environment.replace("PROGRAMS", _variables(PROGRAM_VARIABLES)))
    return "\n".join(parts)


def _section(table: Table) -> str:
    if table.name == "proxy":
        options = ", ".join(f"`--{name.replace('_', '-')}`" for name in PROXY_OPTIONS)
        text = PROXY.replace("OPTIONS", options)
        [alone, *_] = settings_tables(ProxySettings)  # with its defaults where there is no trainer
        return f"{text}\n{_rows(alone.settings)}"
    title = f"## `[{table.name}]`" if table.name else "## Above all tables"
    left_out = " Left out by default: then it is off." if table.optional else ""
    what = f"{table.what}{left_out}" if table.name else "Of `trainer serve`, `step` and `sft`."
    return f"{title}\n\n{what}\n\n{_rows(table.settings)}"


def _rows(settings: Iterable[Setting]) -> str:
    return _table(
        ("setting", "default", "allowed", "meaning"),
        ((f"`{one.name}`", _default(one), _allowed(one), one.what) for one in settings),
    )


def _default(setting: Setting) -> str:
    if setting.required:
        return "required"
    if setting.follows:
        return setting.follows
    value = toml_value(setting.default)
    return "none" if value is None else f"`{value}`"


def _allowed(setting: Setting) -> str:
    return f"{setting.allowed}, in {setting.unit}" if setting.unit else setting.allowed


def _variables(variables: Mapping[str, Variable]) -> str:
    return _table(
        ("variable", "default", "meaning"),
        ((f"`{name}`", one.default, one.what) for name, one in variables.items()),
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def lines() -> Iterator[str]:
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        for row in rows:
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"

    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
