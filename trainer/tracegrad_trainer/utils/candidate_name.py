"""The engine's name of a candidate's adapter, beside the name of what is promoted."""

from __future__ import annotations

_SUFFIX = "-candidate"


def candidate_name(served: str) -> str:
    """Of calls that are to get the candidate, where others get `served`."""
    return served + _SUFFIX


def policy_name(served: str) -> str:
    """Of what is promoted, where `served` is a candidate's name; any other is its own."""
    return served.removesuffix(_SUFFIX)
