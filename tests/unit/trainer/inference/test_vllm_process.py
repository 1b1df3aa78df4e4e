"""Settings of the served model, and the child process around it (no vLLM is started here)."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import ValidationError

from support.proxy.servers import eventually
from tracegrad.private_files import is_private
from tracegrad_trainer.config.vllm import STRICT_TOOL_PARSERS, VllmSettings
from tracegrad_trainer.inference.vllm_process import VllmProcess
from tracegrad_trainer.utils.network import is_port_closed, prepare_socket_folder
from tracegrad_trainer.utils.subprocesses import ChildError


class Pretender(VllmProcess):
    """Runs a line of Python where vLLM would run."""

    def __init__(self, settings: VllmSettings, code: str) -> None:
        super().__init__(settings)
        self.command = [sys.executable, "-c", code]


def settings(tmp_path: Path, **changes: object) -> VllmSettings:
    values = {"model": str(tmp_path), "log": tmp_path / "logs" / "vllm.log"}
    values |= {"socket": tmp_path / "run" / "vllm.sock"}
    return VllmSettings.model_validate(values | changes)


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_only_loopback_is_served(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"0\.0\.0\.0 is not a loopback address"):
        settings(tmp_path, host="0.0.0.0")
    assert settings(tmp_path, host="::1", port=8001).url == "http://[::1]:8001"


def test_an_unknown_setting_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="max_modellen"):
        settings(tmp_path, max_modellen=5)


def test_served_logprobs_are_of_what_is_sampled_from(tmp_path: Path) -> None:
    arguments = settings(tmp_path, device="cpu").arguments()
    assert option(arguments, "--logprobs-mode") == "processed_logprobs"
    assert option(arguments, "--generation-config") == "vllm"
    assert option(arguments, "--dtype") == "float32"
    assert json.loads(option(arguments, "--weight-transfer-config")) == {"backend": "tracegrad_shm"}


def test_the_engine_tells_of_its_queue_unless_it_is_to_keep_no_statistics(tmp_path: Path) -> None:
    """vLLM refuses the two flags together."""
    assert "--enable-per-request-metrics" in settings(tmp_path).arguments()
    silent = settings(tmp_path, extra_args=["--disable-log-stats"]).arguments()
    assert "--enable-per-request-metrics" not in silent


def test_engine_and_worker_share_a_process_only_with_one_thread(tmp_path: Path) -> None:
    lean = settings(tmp_path, device="cpu", threads=1)
    wide = settings(tmp_path, device="cpu", threads=4)
    assert option(lean.arguments(), "--distributed-executor-backend") == "uni"
    assert lean.environment()["TRACEGRAD_FORK_ENGINE"] == "1"
    assert "--distributed-executor-backend" not in wide.arguments()
    assert "TRACEGRAD_FORK_ENGINE" not in wide.environment()
    assert wide.environment()["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("changes", "is_free"),
    [
        ({}, None),
        ({"tool_call_parser": "glm47"}, "0"),
        ({"extra_args": ["--tool-call-parser=glm45"]}, "0"),
        ({"tool_call_parser": "glm47", "extra_args": ["--tool-call-parser", "hermes"]}, None),
        ({"extra_args": ["--tool-strict-level", "function"]}, "0"),
        ({"extra_args": ["--tool-strict-level=auto"]}, None),
    ],
)
def test_no_grammar_samples_tool_calls_that_asked_for_none(
    tmp_path: Path, changes: dict[str, object], is_free: str | None
) -> None:
    given = settings(tmp_path, **changes).environment()
    assert given.get("VLLM_ENFORCE_STRICT_TOOL_CALLING") == is_free


def test_the_parsers_of_vllm_that_constrain_tool_calls_by_themselves_are_known() -> None:
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(vllm.submodule_search_locations[0]) / "tool_parsers"
    [registered] = [
        ast.literal_eval(node.value)
        for node in ast.parse((folder / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "_TOOL_PARSERS_TO_REGISTER"
    ]
    strict = {
        path.stem
        for path in folder.glob("*.py")
        if re.search(r"^ +default_tool_strict_level = ", path.read_text(), re.MULTILINE)
    }
    assert {name for name, (file, _) in registered.items() if file in strict} == STRICT_TOOL_PARSERS


def test_a_gpu_keeps_vllms_own_choices(tmp_path: Path) -> None:
    gpu = settings(tmp_path, device="cuda")
    assert "--enforce-eager" not in gpu.arguments()
    assert option(gpu.arguments(), "--dtype") == "auto"
    assert "OMP_NUM_THREADS" not in gpu.environment()


def test_a_taken_port_is_one_line_and_nothing_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        process = VllmProcess(settings(tmp_path, port=holder.getsockname()[1]))
        with pytest.raises(ChildError, match=r"port \d+ on 127.0.0.1 cannot be used.*in use"):
            process.start()
    assert process.pid is None


def test_by_default_it_listens_on_a_socket_and_no_port(tmp_path: Path) -> None:
    given = settings(tmp_path)
    assert given.url == f"unix://{tmp_path}/run/vllm.sock"
    arguments = given.arguments()
    assert option(arguments, "--uds") == f"{tmp_path}/run/vllm.sock"
    assert not {"--host", "--port"} & set(arguments)
    on_a_port = settings(tmp_path, port=8001)
    assert on_a_port.url == "http://127.0.0.1:8001"
    assert "--uds" not in on_a_port.arguments()


def test_a_path_too_long_for_a_socket_has_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "d" / ("x" * 100) / "run" / "vllm.sock"
    for base in (tmp_path, tmp_path / ("y" * 100)):  # the second one is too long itself
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
        path = settings(tmp_path, socket=deep).socket
        assert len(bytes(path)) <= 107
        assert path.parent.name == f"tracegrad-{os.geteuid()}"
        assert settings(tmp_path, socket=deep).socket == path
        assert settings(tmp_path, socket=path).socket == path, "resolved settings are read again"
        assert settings(tmp_path, socket=deep.with_name("other.sock")).socket != path
        prepare_socket_folder(path)
        assert is_private(path.parent)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
        prepare_socket_folder(path)
        assert not path.exists(), "what a killed server left is no obstacle"


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o770])
def test_a_socket_where_others_may_reach_it_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    process = VllmProcess(settings(tmp_path))
    with pytest.raises(ChildError, match=r"vllm\.socket: .*run is not ours alone"):
        process.start()
    assert process.pid is None


def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's folder")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(ChildError, match="not ours alone"):
        VllmProcess(settings(tmp_path)).start()


def test_a_socket_that_somebody_listens_on_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "run" / "vllm.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(path))
        holder.listen()
        with pytest.raises(ChildError, match=r"vllm\.sock is in use"):
            VllmProcess(settings(tmp_path)).start()
        assert path.exists()
        assert not is_port_closed(f"unix://{path}")
    assert is_port_closed(f"unix://{path}")
    path.unlink()
    assert is_port_closed(f"unix://{path}")


def test_an_early_death_names_the_cause_and_the_log(tmp_path: Path) -> None:
    log = (
        "print('(EngineCore pid=7) ERROR 01-01 [core.py:1] ValueError: no room for the cache');"
        "print('(APIServer pid=6) RuntimeError: Engine core initialization failed. "
        "See root cause above.');"
        "raise SystemExit(1)"
    )
    with Pretender(settings(tmp_path), log) as process, pytest.raises(ChildError) as caught:
        process.wait_healthy(timeout=60)
    message = str(caught.value)
    assert "exited with 1: ValueError: no room for the cache (log: " in message
    assert "\n" not in message


def test_a_kill_is_named_and_old_errors_are_not_blamed(tmp_path: Path) -> None:
    code = "import time; print('ValueError: long ago', flush=True); time.sleep(60)"
    with Pretender(settings(tmp_path), code) as process:
        deadline = time.monotonic() + 60
        while "long ago" not in process.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ChildError, match=r"was killed by SIGKILL \(log: "):
            process.wait_healthy(timeout=60)


def test_a_server_whose_engine_is_dead_takes_no_calls_and_counts_as_ended(tmp_path: Path) -> None:
    """It closes its socket, and lives on for callers who wait for the engine."""
    given, dead = settings(tmp_path), tmp_path / "dead"
    code = f"""
import os, socket, time
server = socket.socket(socket.AF_UNIX)
server.bind({str(given.socket)!r})
server.listen()
while not os.path.exists({str(dead)!r}):
    time.sleep(0.01)
server.close()
time.sleep(3600)
"""
    with Pretender(given, code) as process:
        process.wait_until_ready(lambda: not is_port_closed(given.url), timeout_s=60)
        process.check()
        dead.touch()
        eventually(lambda: is_port_closed(given.url), 60)
        with pytest.raises(ChildError, match=r"vllm \(pid \d+\) takes no calls any more \(log: "):
            process.check()
        process.stop()
        assert not given.socket.exists()
        process.start()
        process.check()  # a server that starts takes none yet


def test_a_server_that_never_answers_runs_out_of_time(tmp_path: Path) -> None:
    stages: list[str] = []
    with (
        Pretender(settings(tmp_path), "import time; time.sleep(60)") as process,
        pytest.raises(ChildError, match="not ready after"),
    ):
        process.wait_healthy(timeout=0.3, on_stage=stages.append)
    assert set(stages) == {"loading libraries"}


def test_stop_ends_grandchildren_and_removes_the_scratch_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, time;"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0));"
        "p = subprocess.Popen([sys.executable, '-c', 'import signal, time;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)']);"
        "print(p.pid, os.environ['TMPDIR'], flush=True); time.sleep(60)"
    )
    process = Pretender(settings(tmp_path), code)
    process.start()
    grandchild, scratch = _first_line(process.log).split()
    assert Path(scratch).is_dir()
    process.stop()
    process.stop()
    assert _gone(int(grandchild))
    assert not Path(scratch).exists()


def test_the_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    here = Path(__file__)
    parent_code = f"""
import sys, time
sys.path[:0] = {[str(here.parent), str(here.parents[3])]!r}
from test_vllm_process import Pretender, settings
from pathlib import Path
process = Pretender(settings(Path({str(tmp_path)!r})), "import time; time.sleep(60)")
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not _gone(child, within=0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _gone(child)


def _first_line(log: Path) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if log.exists() and "\n" in (text := log.read_text()):
            return text.splitlines()[0]
        time.sleep(0.02)
    raise AssertionError("nothing was printed")


def _gone(pid: int, within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
