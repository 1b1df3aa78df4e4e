"""The vaults of examples/ipa: deterministic, reset to behind any call, and hard from the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ipa import words
from ipa.sampling import Attempt, Policy, play
from ipa.vault import (
    JAMMED,
    NAMES,
    OPEN,
    PARTS,
    TOOLS,
    TURNS,
    Expert,
    ReplayDiverged,
    Vault,
    expert,
)
from ipa.warm_start import warm_start
from tracegrad.events import Outcome, Reward, RolloutFinished

names = st.sampled_from(NAMES)
calls = st.tuples(st.sampled_from(TOOLS), st.sampled_from(PARTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return warm_start(tmp_path_factory.mktemp("ipa") / "model", seed=0)


@given(names, st.integers(0, TURNS))
def test_a_reset_with_a_prefix_is_where_the_expert_was(name: str, anchor: int) -> None:
    shown = expert(name)
    vault = Vault(name)
    seen = vault.reset(shown.calls[:anchor], shown.seen[:anchor])
    assert seen == list(shown.seen[:anchor])
    assert vault.opened == (anchor == TURNS)
    for call in shown.calls[anchor:]:
        seen.append(vault.call(call))
    assert seen == list(shown.seen)
    assert seen[-1] == OPEN


@given(names, st.integers(0, TURNS - 1), calls)
def test_one_wrong_call_jams_a_vault_for_good(
    name: str, anchor: int, call: tuple[str, str]
) -> None:
    shown = expert(name)
    vault = Vault(name)
    vault.reset(shown.calls[:anchor])
    if call != shown.calls[anchor]:
        assert vault.call(call) == JAMMED
        assert vault.done
        assert not vault.opened
    vault.reset()
    assert vault.state == f"{name}0"


def test_a_replay_that_goes_another_way_is_noticed_and_is_no_failure_of_the_policys() -> None:
    shown = expert(NAMES[0])
    other = Expert(shown.vault, shown.calls, ("snow", *shown.seen[1:]))
    with pytest.raises(ReplayDiverged):
        Vault(other.vault).reset(other.calls[:2], other.seen[:2])
    attempt = Attempt(other, 2, 0, {})
    assert not attempt.going
    events = attempt.events(1.0)
    assert not any(isinstance(event, Reward) for event in events)
    [end] = [event for event in events if isinstance(event, RolloutFinished)]
    assert end.outcome is Outcome.ENV_ERROR


def test_what_the_model_writes_is_read_back_and_nonsense_is_no_call() -> None:
    for call in words.CALLS.values():
        assert words.heard(words.said(call)) == call
    assert words.heard(words.said(("turn", "red"))[:1]) is None
    assert words.heard([words.ID[words.END], words.ID[words.END]]) is None


def test_the_warm_start_writes_calls_and_knows_no_vault(folder: Path) -> None:
    policy = Policy(folder, seed=0)
    attempts = [Attempt(expert(name), TURNS - 1, 0, {}) for name in NAMES for _ in range(80)]
    play(policy, attempts)
    said = [words.heard(attempt.turns[-1].completion_token_ids.tolist()) for attempt in attempts]
    assert sum(call is None for call in said) < 0.1 * len(said)
    counts = [said.count(call) for call in words.CALLS.values()]
    assert min(counts) > 0.3 * len(said) / len(counts)
    scratch = [Attempt(expert(name), 0, 0, {}) for name in NAMES for _ in range(60)]
    play(policy, scratch)
    assert not any(attempt.vault.opened for attempt in scratch)


def test_the_experts_turns_are_stored_as_the_experts_and_the_rest_with_exact_log_probabilities(
    folder: Path,
) -> None:
    policy = Policy(folder, seed=1)
    attempt = Attempt(expert(NAMES[1]), 3, 7, {})
    exploring = Attempt(expert(NAMES[1]), 3, 7, {}, explores=True)
    play(policy, [attempt, exploring])
    assert [turn.sampling.get("source") for turn in attempt.turns[:4]] == ["demonstration"] * 3 + [
        None
    ]
    assert attempt.turns[3].policy_versions == ((7, 2),)
    assert exploring.turns[3].policy_versions == ((-1, 2),)
    assert exploring.turns[3].completion_logprobs.tolist() == pytest.approx([-2.1972246, 0.0])
    for turn, parent in zip(attempt.turns[1:], attempt.turns, strict=False):
        before = parent.prompt_token_ids + parent.completion_token_ids
        assert turn.parent_id == parent.turn_id
        assert turn.prompt_token_ids[: len(before)] == before
    turn = attempt.turns[3]
    ids = torch.tensor([[*turn.prompt_token_ids, *turn.completion_token_ids]])
    logits = policy._model(ids).logits[0].log_softmax(-1)
    start = len(turn.prompt_token_ids)
    exact = [
        float(logits[start + i - 1, token]) for i, token in enumerate(turn.completion_token_ids)
    ]
    assert turn.completion_logprobs.tolist() == pytest.approx(exact, abs=1e-5)
