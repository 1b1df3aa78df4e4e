"""The ranks of `trainer serve` beside a vLLM and a proxy that outlive them: runs of them, and
whether what is served, the ledger and the checkpoint agree."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedModel

from support.trainer.kill_runs import Runs, log_of
from support.trainer.prepared_run import settings_of, steps_of
from support.trainer.tiny_model import reference_logprobs
from tracegrad.events import Outcome, Reward, RolloutFinished, RolloutStarted
from tracegrad.store import Store
from tracegrad_trainer.cli.export import load_checkpoint_model
from tracegrad_trainer.cli.serve import proxy_process, with_control_key
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.inference.logprob_probe import LogprobGap, compare_logprobs, sample_probe
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.launch.torchrun import secret_variables
from tracegrad_trainer.utils.network import find_free_port, http_client
from tracegrad_trainer.utils.subprocesses import is_responding

KILLED = -9
GAP = 1e-4  # nats; the two engines agree to about 1e-5
PROMPT = [5 + 7 * i % 290 for i in range(24)]


@dataclass
class PushingRanks:
    """Of one folder and one store."""

    runs: Runs
    settings: TrainerSettings
    ranks: int = 1

    @property
    def file(self) -> Path:
        return self.settings.state_dir / "settings.json"

    @property
    def store_url(self) -> str:
        return self.settings.proxy.store

    def run(self, *, until: int, **order: Any) -> bool:
        """Until step `until` is committed and served -> whether it got there, or was killed."""
        limited = self.settings.model_copy(update={"max_steps": until})
        self.file.write_text(limited.model_dump_json())
        env = secret_variables(self.settings)
        statuses = self.runs.run(self.file, program="serve", ranks=self.ranks, env=env, **order)
        assert set(statuses) == {0} or KILLED in statuses, log_of(self.file)
        return set(statuses) == {0}

    def trained(self, step: int) -> PreTrainedModel:
        return trained(self.settings, step)

    def agree(self) -> LogprobGap:
        return agree(self.settings)


def trained(settings: TrainerSettings, step: int) -> PreTrainedModel:
    """The model of a step's checkpoint, as the trainer has it: adapters beside the weights."""
    model = load_checkpoint_model(settings, settings.checkpoints / f"step-{step:08d}")
    assert isinstance(model, PreTrainedModel)
    return model


def agree(settings: TrainerSettings, prompt: Sequence[int] = PROMPT) -> LogprobGap:
    """The engine, the proxy and the store speak of one version, which is the last committed
    step's, and the weights that are served are those of its checkpoint."""
    last = steps_of(settings.proxy.store)[-1].step
    with Store.open(settings.proxy.store, create=False) as store:
        newest = max(store.versions(), key=lambda version: version.version)
        assert store.current_version() == newest.version
    assert (newest.state, newest.step) == ("serving", last)
    with http_client(settings.vllm.url, timeout_s=60) as client:
        engine = client.get("/weight_info").json()
    assert engine["weight_version"] == str(newest.version)
    gate = httpx.get(f"{settings.url}/api/push").json()
    assert gate["version"] == newest.version
    sample = sample_probe(settings.vllm.url, prompt, tokens=24)
    expected = reference_logprobs(trained(settings, last), prompt, sample.token_ids)
    return compare_logprobs(sample.logprobs, expected, GAP)


@contextmanager
def pushing_ranks(
    runs: Runs, engine: VllmProcess, model: Path, state_dir: Path, **changes: object
) -> Iterator[PushingRanks]:
    """With a proxy of their own, as `trainer serve` starts it."""
    places = {"vllm__socket": engine.settings.socket, "proxy__port": find_free_port()}
    state_dir.mkdir(mode=0o700, exist_ok=True)
    ranks = int(str(changes.get("ranks", 1)))
    settings = with_control_key(settings_of(model, state_dir, **places, **changes))
    proxy = proxy_process(settings)
    proxy.start()
    try:
        proxy.wait_until_ready(lambda: is_responding(f"{settings.url}/healthz"), timeout_s=60)
        yield PushingRanks(runs, settings, ranks)
    finally:
        proxy.stop()


class Agents(threading.Thread):
    """Rollouts of one call each, all at once; joined, they have an outcome and a reward."""

    def __init__(self, settings: TrainerSettings, *, groups: int, group_size: int = 3) -> None:
        super().__init__()
        self.settings = settings
        self.rollouts = [
            (f"late task {group}", f"late-{group}-{number}")
            for group in range(groups)
            for number in range(group_size)
        ]
        self.failures: list[str] = []

    def run(self) -> None:
        with Store.open(self.settings.proxy.store) as store:
            store.append([RolloutStarted(rollout_id=r, task_id=task) for task, r in self.rollouts])
        calls = [
            threading.Thread(target=self._call, args=(rollout,)) for _, rollout in self.rollouts
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
        with Store.open(self.settings.proxy.store) as store:
            for number, (_, rollout) in enumerate(self.rollouts):
                store.append(
                    [
                        Reward(rollout_id=rollout, value=float(number % 2)),
                        RolloutFinished(rollout_id=rollout, outcome=Outcome.COMPLETED),
                    ]
                )

    def _call(self, rollout: str) -> None:
        request = {
            "model": self.settings.vllm.served_model_name,
            "messages": [{"role": "user", "content": f"What is {rollout}?"}],
            "max_tokens": 12,
            "temperature": 1.0,
        }
        url = f"{self.settings.url}/rollouts/{rollout}/v1/chat/completions"
        try:
            httpx.post(url, json=request, timeout=60).raise_for_status()
        except httpx.HTTPError as error:
            self.failures.append(f"{rollout}: {error!r}")
