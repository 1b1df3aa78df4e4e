"""Logs as JSON lines: what a line has, that nothing else is written, and how it reads as text."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from tracegrad.log_format import JsonFormatter, as_text


def formatted(message: str, *args: object, **record: Any) -> dict[str, Any]:
    made = logging.makeLogRecord(
        {"name": "tracegrad.test", "levelno": 30, "levelname": "WARNING", "msg": message}
        | {"args": args, "created": 1_763_640_000.25}
        | record
    )
    found: dict[str, Any] = json.loads(JsonFormatter(role="proxy", worker=2).format(made))
    return found


def raised() -> Any:
    try:
        raise LookupError("gone")
    except LookupError:
        return sys.exc_info()


def test_a_line_has_what_the_record_has() -> None:
    found = formatted("%d of %s", 3, "them", rollout_id="r1", exc_info=raised())
    assert found["time"] == "2025-11-20T12:00:00.250Z"
    assert (found["level"], found["logger"]) == ("WARNING", "tracegrad.test")
    assert found["message"] == "3 of them"
    assert (found["role"], found["worker"]) == ("proxy", 2)
    assert found["rollout_id"] == "r1"
    assert found["exception"].endswith("LookupError: gone")


def test_an_extra_takes_no_field_of_ours_and_may_be_anything() -> None:
    own: list[object] = []
    own.append(own)
    found = formatted("x", role="mine", held=own, lines="a\nb")
    assert (found["role"], found["role_"]) == ("proxy", "mine")
    assert found["held"] == "<list that JSON cannot hold>"
    assert found["lines"] == "a\nb"


PROGRAM = """
import logging, threading, warnings
from tracegrad.log_format import write_json_log
library = logging.getLogger("library")
library.addHandler(logging.StreamHandler())
write_json_log("rank", rank=1)
library.warning("by its own handler")
warnings.warn("deprecated")
thread = threading.Thread(target=lambda: 1 / 0, name="side")
thread.start(); thread.join()
raise ValueError("what is\\nwrong")
"""


@pytest.fixture(scope="module")
def stderr() -> str:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert found.returncode == 1
    return found.stderr


def test_all_that_a_process_says_is_json(stderr: str) -> None:
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert [line["level"] for line in lines] == ["WARNING", "WARNING", "ERROR", "CRITICAL"]
    assert {line["role"] for line in lines} == {"rank"}
    assert {line["rank"] for line in lines} == {1}
    assert "deprecated" in lines[1]["message"]
    assert "thread side ended by ZeroDivisionError" in lines[2]["message"]
    assert lines[3]["message"] == "ValueError: what is\nwrong"


def test_as_text_it_ends_as_a_traceback_does(stderr: str) -> None:
    """By which the cause of a process' death is found in its log."""
    text = as_text(f"a line of C++\n{stderr}")
    assert text.startswith("a line of C++\n")
    assert re.search(r"^Traceback \(most recent call last\):$", text, re.MULTILINE)
    assert text.endswith("ValueError: what is\nwrong")


def test_lines_that_are_no_json_stay() -> None:
    for log in ("plain\n{not json", '{"time": "cut off', ""):
        assert as_text(log) == log
