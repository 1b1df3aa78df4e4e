"""Which kill a stream broke of, in docs/bench-kills.md."""

from __future__ import annotations

from bench.kills.killer import Kill
from bench.kills.streams import TOKENS, ReadStream, Streams


def test_a_stream_counts_for_the_one_kill_in_its_middle() -> None:
    kills = [
        Kill("vllm", "training", up_again_s=10.0, at=100.0),
        Kill("proxy", "waiting", up_again_s=1.0, at=120.0),
        Kill("engine", "training", up_again_s=10.0, at=122.0),
    ]
    read = [
        ReadStream(50.0, 60.0, TOKENS, None),  # before all
        ReadStream(99.0, 112.0, TOKENS, None),
        ReadStream(99.5, 111.0, 0, "APIError"),
        ReadStream(105.0, 112.0, TOKENS, None),  # began while vLLM was coming up again
        ReadStream(119.0, 121.5, 0, "APIConnectionError"),
        ReadStream(119.0, 140.0, TOKENS, None),  # two kills
        ReadStream(150.0, 151.0, 7, None),
    ]
    streams = Streams(read)
    assert streams.broken_by(kills) == {"vllm": (2, 1), "proxy": (1, 1), "several": (1, 0)}
    assert streams.short == 1
