"""No reason that the code knows lacks words: the code itself is read for reasons."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracegrad.events import Outcome
from tracegrad.inspect.reasons import (
    FORK_TEXTS,
    UNTRAINED_TEXTS,
    WAITING_TEXTS,
    fork_text,
    untrained_text,
)
from tracegrad.proxy.prompt_reuse.fork_reasons import ForkReason
from tracegrad.store.filters import STATES
from tracegrad.store.types import HELD_OUT, PENDING_STATES

ROOT = Path(__file__).resolve().parents[3]
# Functions that answer with a reason why a turn must not be trained.
ANSWERING = {
    "untrainable_reason",
    "_untrainable",
    "turn_reason",
    "outcome_reason",
    "length_reason",
    "media_untrainable_reason",
}
# Calls, and which of their arguments is such a reason.
GIVEN = {"discard_tokens": 0, "discard_batch": -1, "without_rows": -1}
# Fields of turns and of the ledger that hold one, and constants that are one.
FIELDS = {"untrainable", "skip_reason"}
CONSTANTS = {
    "DRIFT_GUARD",
    "HELD_OUT",
    "LATE",
    "MASKED",
    "OVER_LENGTH",
    "OVER_SAMPLED",
    "TOKENS_REDACTED",
    "UNACKNOWLEDGED",
}


def texts(node: ast.AST | None, constants: dict[str, str]) -> Iterator[str]:
    """The texts that an expression may come to."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name(id=name) if name in constants:
            yield constants[name]
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*texts(body, constants), *texts(orelse, constants))
        case ast.BoolOp(values=values):
            for value in values:
                yield from texts(value, constants)


def constants_of(tree: ast.Module) -> dict[str, str]:
    return {
        name: text
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target, value in [(node.targets[0], node.value)]
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant)
        for name, text in [(target.id, value.value)]
        if isinstance(text, str)
    }


def expressions_of(tree: ast.AST, *, trainer: bool) -> Iterator[ast.AST | None]:
    """What becomes a reason."""
    assigned = FIELDS | CONSTANTS | ({"reason"} if trainer else set())
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) if name in ANSWERING:
                yield from (n.value for n in ast.walk(node) if isinstance(n, ast.Return))
            case ast.Call(func=ast.Attribute(attr=name), args=args) if name in GIVEN and args:
                yield args[GIVEN[name]]
            case ast.keyword(arg=name, value=value) if name in FIELDS:
                yield value
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value in FIELDS:
                        yield value
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in assigned:
                yield value


def reasons_of_the_code() -> dict[str, str]:
    """Each with a file that knows it."""
    wings = ("sdk/tracegrad", "trainer/tracegrad_trainer")
    paths = [path for wing in wings for path in sorted((ROOT / wing).rglob("*.py"))]
    trees = {
        path: ast.parse(path.read_text())
        for path in paths
        if not {"cli", "inspect"} & {*path.parts}
    }
    everywhere = {
        name: text for tree in trees.values() for name, text in constants_of(tree).items()
    }
    found: dict[str, str] = {}
    for path, tree in trees.items():
        constants = everywhere | constants_of(tree)
        for expression in expressions_of(tree, trainer="tracegrad_trainer" in path.parts):
            # The names of columns are none ("text", as a file's types have it), nor is why the SDK
            # dropped an event that it could not send.
            if path.name in ("parquet_columns.py", "exporter.py", "telemetry.py", "decorators.py"):
                continue
            for reason in texts(expression, constants):
                found.setdefault(reason, str(path.relative_to(ROOT)))
    return found


def test_every_reason_why_a_turn_is_not_trained_has_words() -> None:
    found = reasons_of_the_code()
    # What is found is what is looked for.
    some = "greedy constrained media echo no_tokens no_logprobs aborted version_unknown over_length"
    refused = "unacknowledged"
    more = "late equal_reward stale over_long non_finite non_finite_step failed_push redacted"
    filters = "foreign_token repeated_turn truncated predicate unpaired"
    assert {*some.split(), *more.split(), *filters.split(), refused} <= found.keys()
    missing = {reason: path for reason, path in found.items() if reason not in UNTRAINED_TEXTS}
    assert not missing, "write their words and fixes into tracegrad/inspect/reasons.py"


def test_words_are_of_reasons_that_there_are() -> None:
    assert set(UNTRAINED_TEXTS) <= {*reasons_of_the_code(), *Outcome}


def test_every_outcome_that_a_batch_may_leave_out_has_words() -> None:
    assert {outcome.value for outcome in Outcome} <= UNTRAINED_TEXTS.keys()


def test_every_state_of_a_rollout_that_is_not_trained_has_words() -> None:
    unscored = {outcome.value for outcome in Outcome if not outcome.scored}
    done = {"consumed", "trained", "skipped"}
    never = unscored | {HELD_OUT}
    assert {*STATES, "not_selected"} - done == WAITING_TEXTS.keys() | never
    assert never <= UNTRAINED_TEXTS.keys()


def test_states_that_are_counted_as_waiting_have_words() -> None:
    assert set(PENDING_STATES) == WAITING_TEXTS.keys()


def test_every_fork_has_words_and_a_fix() -> None:
    assert {reason.value for reason in ForkReason} == FORK_TEXTS.keys()
    without = {reason for reason, words in FORK_TEXTS.items() if not words.fix}
    assert without == {"new_conversation"}
    assert FORK_TEXTS["media"].meaning == ForkReason.MEDIA.meaning


@pytest.mark.parametrize("table", [FORK_TEXTS, UNTRAINED_TEXTS, WAITING_TEXTS])
def test_words_are_sentences(table: dict[str, tuple[str, str]]) -> None:
    for reason, (meaning, fix) in table.items():
        assert meaning.endswith("."), reason
        assert not fix or fix.endswith((".", ")")), reason
        assert "  " not in meaning + fix, reason


def test_a_reason_of_another_version_has_none() -> None:
    assert untrained_text("of tomorrow") == fork_text("of tomorrow")
    assert "no words" in fork_text("of tomorrow").meaning
