"""A rollout without its tokens and texts, beside the whole of it."""

from __future__ import annotations

from support.cli.sample_rollouts import coding_agent, samples_of_one_prompt
from tracegrad.store import Store
from tracegrad.store.read.rollout_outline import rollout_outline, turn_tokens, with_texts

CODING = "0193c0de0001" + "0" * 20


def test_outlines_have_the_texts_and_tokens_of_the_whole(store: Store) -> None:
    store.append([*coding_agent(), *samples_of_one_prompt()])
    for rollout in (CODING, "0193c0de0002" + "0" * 20):
        whole = store.rollout_turns(rollout)
        with store.reading() as connection:
            outline = rollout_outline(connection, rollout)
            some = with_texts(connection, outline, {len(whole) - 1, 1})
            for number, turn in enumerate(whole):
                size = outline.sizes[number]
                assert size.prompt == len(turn.prompt_token_ids)
                assert size.versions == turn.policy_versions
                tokens = turn_tokens(connection, turn.turn_id)
                assert tokens is not None
                assert tokens.sampled == turn.completion_token_ids
                assert tokens.logprobs == turn.completion_logprobs
        assert {number: turn.request for number, turn in some.items()} == {
            number: whole[number].request for number in (1, len(whole) - 1)
        }
