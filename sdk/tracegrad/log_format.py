"""Logs as JSON lines: one object for each record, on standard error.

A line has `time` (UTC, ISO 8601, milliseconds), `level`, `logger`, `message`, `role` (which process
of ours: proxy, worker, writer, supervisor, rank, launcher, scorers, resampling, wake_guard), `pid`,
what the record carries as `extra=`, and `exception` (the traceback) where there is one. Workers
and ranks have their number, as `worker` or `rank`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import orjson

from tracegrad.jsonutil import encode_json

LogFormat = Literal["text", "json"]
# By which a program of ours has its children write as it does, before they read their settings.
LOG_FORMAT_VARIABLE = "TRACEGRAD_LOG_FORMAT"

_BEGIN = '{"time":'
# What every record has; all else is somebody's `extra`. taskName: from Python 3.12 on.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON. `fields` are the process' own, the same in each line."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            "pid": record.process,
        }
        for name, value in vars(record).items():
            if name not in _OWN:
                # An extra that is called as a field of ours loses its name, not its value.
                line[f"{name}_" if name in line else name] = _encodable(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["exception"] = record.exc_text
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return encode_json(line).decode()


def _encodable(value: object) -> object:
    try:
        encode_json(value)
    except Exception:  # a value that holds itself, or whose own `str` fails
        return f"<{type(value).__name__} that JSON cannot hold>"
    return value


def inherited_log_format() -> LogFormat:
    """What the program that started this one asked for."""
    return "json" if os.environ.get(LOG_FORMAT_VARIABLE) == "json" else "text"


def write_log(role: str, log_format: LogFormat | None = None, *, text: str) -> None:
    """Of a program without ranks: its log on standard error, as JSON lines, or with this format of
    `logging`. `log_format`: default what the program that started this one asked for."""
    if (log_format or inherited_log_format()) == "json":
        write_json_log(role)
    else:
        logging.basicConfig(level=logging.INFO, format=text)


def write_json_log(
    role: str, *filters: logging.Filter, level: int = logging.INFO, **fields: object
) -> None:
    """From now on all that this process logs goes to standard error as JSON lines: warnings and
    uncaught errors too, and what libraries with handlers of their own would write there. May be
    called again: a fork has another role.

    `level`: of loggers that have none of their own. `filters`: which records are written.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(role=role, **fields))
    for each in filters:
        handler.addFilter(each)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in list(root.manager.loggerDict):
        _take_over(logging.getLogger(name))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_of_thread
    sys.unraisablehook = _log_unraisable


def _take_over(logger: logging.Logger) -> None:
    """A library's handler would put lines of text between ours."""
    for handler in list(logger.handlers):
        if getattr(handler, "stream", None) in (sys.stderr, sys.stdout):
            logger.removeHandler(handler)
            logger.propagate = True


def writes_json_log() -> bool:
    """Whether `write_json_log` has been called."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)


def write_last_words(line: str) -> None:
    """Why this process ends, on standard error, for people and for whoever started it
    (`as_text`). `line` is as a traceback ends: `ValueError: what is wrong`."""
    if writes_json_log():
        logging.getLogger("tracegrad").critical("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)


def as_text(log: str) -> str:
    """A log with its JSON lines as lines of text; other lines are as they were.

    Of a critical record there is the message alone, as a process without JSON would end: it is the
    cause of the process' end.
    """
    if _BEGIN not in log:
        return log
    return "\n".join(_line_as_text(line) for line in log.splitlines())


def _line_as_text(line: str) -> str:
    if not line.startswith(_BEGIN):
        return line
    try:
        record = orjson.loads(line)
    except ValueError:  # cut off, by a full disk or a kill
        return line
    message = record.get("message", "")
    head = f"{record['time']} {record.get('level')} {record.get('logger')}: {message}"
    trace = record.get("exception")
    if record.get("level") == "CRITICAL":
        return f"{trace}" if trace else f"{message}"
    return f"{head}\n{trace}" if trace else head


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    said = f"{kind.__name__}: {error}"
    logging.getLogger("tracegrad").critical("%s", said, exc_info=(kind, error, trace))


def _log_uncaught_of_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    logging.getLogger("tracegrad").error(
        "thread %s ended by %s: %s",
        args.thread.name if args.thread else "?",
        args.exc_type.__name__,
        args.exc_value,
        exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
    )


def _log_unraisable(args: sys.UnraisableHookArgs) -> None:
    error = args.exc_value
    logging.getLogger("tracegrad").error(
        "%s: %r", args.err_msg or "an error that nobody can catch", args.object, exc_info=error
    )
