"""The wheel, in an environment that has it alone: the Python of the tests, and the light install.

`test_every_python.py` is the same for every Python that can be found, with a proxy of the wheel's.
"""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tracegrad
from support.packages import clean_venv, wheel
from support.packages.clean_venv import CleanVenv
from support.packages.programs import TRACED_CALL, TYPED
from support.packages.wheel import Distributions
from support.sdk.fake_proxy import serve

# What an agent's process gets: these, and nothing else.
LIGHT = {
    "tracegrad",
    "opentelemetry-api",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-proto",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "protobuf",
    "typing-extensions",
}

pytestmark = pytest.mark.timeout(1800)  # it installs from the package index


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return wheel.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def light(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> CleanVenv:
    folder = tmp_path_factory.mktemp("light") / "venv"
    # What is new upstream today is `make test-packages`' to find.
    pinned = LIGHT - {"tracegrad"}
    return clean_venv.make(sys.executable, folder, str(built.wheel), as_here=pinned)


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(
            archive.read(f"tracegrad-{tracegrad.__version__}.dist-info/METADATA")
        )
    own = {name for name in names if ".dist-info/" not in name}
    assert own == wheel.files_of_packages()
    assert {f"{package.name}/py.typed" for package in wheel.PACKAGES} <= own
    licences = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}
    assert metadata["Version"] == tracegrad.__version__


def test_the_sdist_has_what_builds_the_wheel(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE"} <= names
    others = ("tests/", "bench/", "docs/", ".ci/", ".cache/")
    assert not [name for name in names if name.startswith(others)]


def test_a_light_install_brings_opentelemetry_and_nothing_else(light: CleanVenv) -> None:
    assert light.distributions() == LIGHT


def test_a_light_install_records_a_rollout(light: CleanVenv) -> None:
    proxy, server = serve()
    try:
        done = light.run("python", "-c", TRACED_CALL, TRACEGRAD_URL=proxy.url)
    finally:
        server.shutdown()
        server.server_close()
    assert (done.stdout, done.returncode) == ("four\n", 0), done.stderr
    assert [reward[0] for reward in proxy.rewards()] == [1.0]
    assert proxy.ends() == [("completed", None)]
    assert len(proxy.chats) == 1


def test_commands_of_a_light_install_say_what_they_need(light: CleanVenv) -> None:
    version = light.run("tracegrad", "--version")
    assert version.stdout == f"tracegrad {tracegrad.__version__}\n"
    for command, extra in (("tracegrad", "proxy"), ("trainer", "trainer")):
        said = light.run(command, "--help")
        wanted = f"{command}: typer is not installed: pip install 'tracegrad[{extra}]'\n"
        assert (said.stderr, said.returncode) == (wanted, 1)


def test_a_type_checker_sees_the_types_of_the_wheel(light: CleanVenv) -> None:
    program = light.folder / "agent.py"
    program.write_text(TYPED)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--cache-dir=/dev/null",
         "--config-file=/dev/null", "--python-executable", light.python, program],
        cwd=light.folder, env=light.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = checked.stdout
    assert 'Revealed type is "def (question: str) -> int"' in said, said + checked.stderr
    assert 'Revealed type is "str"' in said
    errors = [line for line in said.splitlines() if ": error: " in line]
    assert len(errors) == 1, said
    assert 'Argument 1 to "reward"' in errors[0]
