"""Care beside a writer: whichever commits first, what is stored can be read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.store.conversations import request
from support.store.events import make_turn, rollout_events
from support.store.maintenance import drop, remove, selection
from support.store.redactions import SECRET, WORDS, conversation, rule, without
from tracegrad.events import Outcome, Turn
from tracegrad.jsonutil import dump_json
from tracegrad.store import Store
from tracegrad.store import store as store_module
from tracegrad.store.maintenance import RetentionRule, examine, prune, redact, redaction

ABORTED = Outcome.ABORTED


def while_it_holds(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, other: Callable[[], object]
) -> threading.Thread:
    """`other` begins when `module.name` is called, whose transaction stays open a while."""
    original = getattr(module, name)
    thread = threading.Thread(target=other)

    def held(*arguments: Any) -> Any:
        if thread.ident is None:
            thread.start()
            time.sleep(0.3)
            assert thread.is_alive(), "it did not wait"
        return original(*arguments)

    monkeypatch.setattr(module, name, held)
    return thread


def following(parent: Turn) -> Turn:
    assert parent.request is not None
    texts = [message["content"] for message in parent.request["messages"][1:]]
    return make_turn("next", parent=parent, request=request(*texts, f"{WORDS}one more"))


def test_a_turn_that_comes_while_its_base_is_redacted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(url) as writing, Store.open(url) as caring:
        turns = conversation(writing, "hello", SECRET)
        new = following(turns[1])
        thread = while_it_holds(
            monkeypatch, redaction, "record_removal", lambda: writing.append([new])
        )
        redact(caring, rule())
        thread.join()
        assert writing.rollout_turns("r") == [*(without(turn) for turn in turns), new]


def test_a_turn_that_is_not_committed_yet_when_its_rollout_is_redacted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(url) as writing, Store.open(url) as caring:
        turns = conversation(writing, "hello", SECRET)
        new = following(turns[1])
        thread = while_it_holds(
            monkeypatch, store_module, "_check_cache_is_current", lambda: redact(caring, rule())
        )
        writing.append([new])
        thread.join()
        assert writing.rollout_turns("r") == [without(turn) for turn in (*turns, new)]


def test_a_writer_believes_its_memory_again_after_a_removal(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = conversation(store, "hello", SECRET)
    redact(store, rule())
    new = following(turns[1])
    store.append([new])  # by what is stored

    def read(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(store, "_append_from_store", read)
    later = following(new)
    fresh = make_turn("fresh", request=request(WORDS))
    store.append([fresh])
    store.append([make_turn("child", parent=fresh, request=request(WORDS, "x"))])
    monkeypatch.undo()
    store.append([make_turn("later", parent=new, request=later.request)])
    assert SECRET in dump_json(store.rollout_turns("r")[-1].request)


def test_after_all_kinds_of_care_beside_busy_writers_the_doctor_finds_nothing(url: str) -> None:
    """Writers share rollouts and put several into one transaction, as proxies do."""
    with Store.open(url) as caring:

        def write(writer: int) -> None:
            latest: dict[str, Turn] = {}
            with Store.open(url) as writing:
                for number in range(25):
                    names = [f"shared{(number + n) % 4}" for n in range(3)]
                    made = [longer(latest.get(name), name, f"{writer}.{number}") for name in names]
                    latest |= {turn.rollout_id: turn for turn in made}
                    writing.append([*made, *rollout_events(f"{writer}.{number}", outcome=ABORTED)])

        def longer(parent: Turn | None, name: str, turn_id: str) -> Turn:
            before = parent.request["messages"][1:] if parent and parent.request else []
            texts = [*(message["content"] for message in before[-5:]), f"{WORDS}{SECRET}"]
            return make_turn(f"{name}.{turn_id}", name, parent=parent, request=request(*texts))

        removed = 0
        pool = ThreadPoolExecutor(3)
        writers = [pool.submit(write, n) for n in range(3)]
        while not all(writer.done() for writer in writers):
            redact(caring, rule(drop_tokens=True))
            drop(caring, "shared0")
            removed += prune(caring, RetentionRule(selection=selection()), at_once=3)["rollouts"]
        for writer in writers:
            writer.result()
        redact(caring, rule())
        removed += remove(caring, also_untrained=False)["rollouts"]
        assert removed == 75
        assert [f for f in examine(caring).findings if f.check != "database"] == []
        turns = [turn for n in range(4) for turn in caring.rollout_turns(f"shared{n}")]
        assert len(turns) == 3 * 25 * 3
        assert SECRET not in dump_json([turn.request for turn in turns])
