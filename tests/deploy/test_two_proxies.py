"""Two real proxies behind deploy/haproxy.cfg, on one store: a rollout outlives either of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai

from support.deploy.haproxy import haproxy
from support.engines.byte_tokenizer import save_byte_tokenizer
from support.engines.mock_engine import Answer, MockEngine
from support.proxy.proxy_process import ProxyProcess
from support.proxy.servers import serving
from tracegrad.store import Store


def test_a_rollout_goes_on_in_another_proxy(tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path / 'store.db'}"
    engine = MockEngine(takes_ids=True)
    with ExitStack() as stack:
        engine_url = stack.enter_context(serving(engine.app(), lifespan="off"))
        folder = save_byte_tokenizer(tmp_path)
        proxies = [
            ProxyProcess(engine_url, store_url, tmp_path / f"proxy-{n}.log", tokenizer=folder)
            for n in range(2)
        ]
        for each in proxies:
            stack.callback(each.close)
            each.start()
        log = tmp_path / "haproxy.log"
        address = stack.enter_context(haproxy([each.url for each in proxies], log))
        # Retries: HAProxy may not know yet that the other one is there again.
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{address}/v1", api_key="tg-r1", max_retries=5, timeout=60)
        )
        messages: list[Any] = [{"role": "user", "content": "Begin."}]
        for turn in range(4):
            # Whichever has the rollout: one of the two turns that follow goes to the other.
            gone = proxies[turn % 2] if turn else None
            if gone is not None:
                gone.kill()
            engine.replies.append(Answer(content=f"answer {turn}"))
            said = client.chat.completions.create(model="m", messages=messages)
            reply = said.choices[0].message.content
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "Go on."},
            ]
            if gone is not None:
                gone.start()
    with Store.open(store_url) as store:
        turns = store.rollout_turns("r1")
    assert [turn.parent_id for turn in turns] == [None, *(turn.turn_id for turn in turns[:-1])]
    assert len(turns) == 4
