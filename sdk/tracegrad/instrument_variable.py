"""TRACEGRAD_INSTRUMENT: what `instrument()` does, without a line of the program.

`import tracegrad` reads it. A framework is instrumented as soon as it is imported, at once if that
is before tracegrad: nothing is imported for its sake, so the variable may be set for processes that
use none of them, this package's own too. Nothing here raises into the program's imports.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from types import ModuleType

from tracegrad import context
from tracegrad.frameworks import FRAMEWORKS, Framework, by_name
from tracegrad.import_hook import ImportHook
from tracegrad.instrumentation import installed_frameworks, is_installed, turn_on, warn_once
from tracegrad.serializer import bounded_repr
from tracegrad.signal_errors import is_of_signal_handler

_log = logging.getLogger("tracegrad")

INSTRUMENT_VARIABLE = "TRACEGRAD_INSTRUMENT"
ALL, NONE = "1", "0"


def follow_instrument_variable() -> None:
    """Instruments what is imported by now, and each other framework where it is imported."""
    said = [each.strip() for each in os.environ.get(INSTRUMENT_VARIABLE, "").split(",")]
    names = list(filter(None, said))
    if names in ([], [NONE]):
        return
    named = names != [ALL]
    chosen = _named(names) if named else list(FRAMEWORKS)
    instrument = {
        module: functools.partial(_instrument, each, named=named)
        for each in chosen
        for module in each.modules
    }
    ImportHook(instrument).install()
    for name, function in instrument.items():
        if (module := sys.modules.get(name)) is not None:
            function(module)


def _named(names: list[str]) -> list[Framework]:
    """Those of the names that are frameworks', and installed; a warning for each other one."""
    known = by_name()
    chosen: dict[str, Framework] = {}
    for name in names:
        if (framework := known.get(name)) is None:
            warn_once(
                f"{INSTRUMENT_VARIABLE}: {bounded_repr(name)} is no framework that is known here;"
                f" write {ALL} for all that are installed, or names of {', '.join(sorted(known))},"
                " with commas between"
            )
        elif not is_installed(framework):
            warn_once(
                f"{INSTRUMENT_VARIABLE}: {framework.title} is not installed here:"
                f" pip install {framework.packages[0]}"
            )
        else:
            chosen[framework.name] = framework
    return list(chosen.values())


def _instrument(framework: Framework, _: ModuleType, *, named: bool) -> None:
    try:
        if not named and framework not in installed_frameworks():
            return  # a client beside a framework
        on = turn_on([framework], context.proxy_url(), named=named)
        if on and (named or not framework.is_addon):
            _log.info("%s: %s is instrumented", INSTRUMENT_VARIABLE, framework.name)
    except Exception as error:
        if is_of_signal_handler(error):
            raise
        warn_once(f"{INSTRUMENT_VARIABLE}: {framework.title} is not instrumented: {error}")
