"""Whether whoever made a container still lives."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tracegrad.runner.sandbox_owner import SandboxOwner


def test_this_process_lives_and_its_label_says_the_same() -> None:
    owner = SandboxOwner.this_process()
    assert SandboxOwner.parse(str(owner)) == owner
    assert owner.is_dead() is False


def test_one_that_ended_is_dead_also_before_anybody_took_notice() -> None:
    line = "from tracegrad.runner.sandbox_owner import *; print(SandboxOwner.this_process())"
    process = subprocess.Popen([sys.executable, "-c", line], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    owner = SandboxOwner.parse(process.stdout.read().strip())
    assert owner is not None
    assert owner.pid == process.pid
    process.wait()
    assert owner.is_dead() is True


def test_a_number_that_is_given_out_again_is_another_process() -> None:
    owner = SandboxOwner.this_process()
    assert replace(owner, started=owner.started - 1).is_dead() is True


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"namespace": "1"}])
def test_who_cannot_be_seen_from_here_may_live(elsewhere: dict[str, str]) -> None:
    assert replace(SandboxOwner.this_process(), **elsewhere).is_dead() is None


@pytest.mark.parametrize("label", ["", "a:b:c", "a:b:c:d", "a:b:1:x", "a:b:1:2:3"])
def test_what_nobody_of_ours_wrote_is_nobody(label: str) -> None:
    assert SandboxOwner.parse(label) is None
