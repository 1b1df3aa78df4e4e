"""What rank 0 decides reaches the others."""

from __future__ import annotations

from support.trainer.differing_ranks import other_settings_are_named
from support.trainer.ranks import run_on_ranks
from support.trainer.stopping_ranks import all_stop_as_rank_zero_does


def test_a_rollback_ends_every_rank_as_what_it_is() -> None:
    run_on_ranks(all_stop_as_rank_zero_does, 2)


def test_a_rank_with_other_settings_is_named_with_its_host_on_every_rank() -> None:
    run_on_ranks(other_settings_are_named, 2)
