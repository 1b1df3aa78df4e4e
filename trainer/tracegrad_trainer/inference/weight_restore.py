"""An engine that was started again gets the weights that are served, and a proxy their version.

An engine starts with the weights of its model folder and says so; a proxy starts with calls held.
"""

from __future__ import annotations

from collections.abc import Callable

from tracegrad_trainer.inference.canary_push import CanaryPush
from tracegrad_trainer.inference.control_routes import ServedWeights
from tracegrad_trainer.inference.weight_swap import WeightSwap


class WeightRestore:
    """Each method returns whether somebody needed it, and raises PushError, EngineLostError; then
    it is to be called again. Nothing is done while an engine does not answer."""

    def __init__(self, swap: WeightSwap) -> None:
        self._swap = swap
        self._says_versions = (
            True  # whether an engine's word is that of the last push, as vLLM's is
        )

    def all_together(self, served: ServedWeights, serve: Callable[[], object]) -> bool:
        """Of engines that stand still together: `serve` gives `served` to all, unless they say that
        they have it, and a proxy alone was started again."""
        swap = self._swap
        have_it = swap.engines.serves(served.version) if self._says_versions else None
        if have_it is not False and not swap.in_doubt:
            if not swap.proxy.has_another(served.version):
                return False
            if have_it:
                with swap.own_watch(), swap.proxy.only_stale():
                    self._tell_proxy(served, {}, None)
                return True
        swap.in_doubt = True
        with swap.own_watch():
            serve()
        swap.in_doubt = False
        self._says_versions = swap.engines.serves(served.version) is not False
        return True

    def one_by_one(self, served: ServedWeights, canary: CanaryPush | None) -> bool:
        """Of engines that do not stand still together, and may differ."""
        swap = self._swap
        wanted = dict.fromkeys(swap.engines.urls, served)
        apart: dict[str, int] = {}
        if canary is not None and canary.candidate is not None:
            # Behind an engine's own: as a name on it, it is lost with these.
            wanted[canary.place] = canary.candidate
            apart = {canary.place: canary.candidate.version}
        lacking = [place for place, one in wanted.items() if self._lacks(place, one)]
        with swap.own_watch():
            swap.engines.ask_all()
            for place in lacking:
                with (canary or swap).only(place):
                    swap.change(wanted[place], wanted[place])
            # Behind these: to set all versions again while calls come would, for a moment, call a
            # candidate's tokens those of what is promoted.
            is_stale = swap.proxy.has_another(served.version, of_upstreams=apart)
            if is_stale:
                # Only those that were started again: they hold their calls.
                with swap.proxy.only_stale():
                    self._tell_proxy(served, apart, canary)
        if lacking:
            self._says_versions = not any(self._lacks(place, one) for place, one in wanted.items())
        return bool(lacking) or is_stale

    def _tell_proxy(
        self, served: ServedWeights, apart: dict[str, int], canary: CanaryPush | None
    ) -> None:
        """It was started again, and holds calls until then."""
        proxy = self._swap.proxy
        proxy.set_version(served.version)
        for place, version in apart.items():
            assert canary is not None
            with canary.only(place):
                proxy.set_version(version)
            canary.begin()
        proxy.release()

    def _lacks(self, place: str, weights: ServedWeights) -> bool:
        with self._swap.engines.only(place):
            return self._says_versions and self._swap.engines.serves(weights.version) is False
