"""The CPU build of torch comes by its hash, wherever pip is set up to look."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_way_to_torch_asks_for_its_hash(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def pip_install(*arguments: str, packages: int, label: str) -> bool:
        asked.append(arguments)
        return False

    monkeypatch.setattr(install, "pip_install", pip_install)
    with pytest.raises(install.InstallError, match=r"torch-cpu\.txt"):
        install.install_torch_cpu()
    assert len(asked) == 2
    for arguments in asked:
        assert "--require-hashes" in arguments
        assert arguments[arguments.index("-r") + 1] == str(install.TORCH_LOCK)


def test_there_is_a_hash_for_each_python_and_machine(install: ModuleType) -> None:
    text = install.TORCH_LOCK.read_text()
    assert install.TORCH in text
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", text)
    assert len(set(hashes)) == 3 * 2, "3.11 to 3.13, x86_64 and aarch64"


def test_a_wheel_of_another_hash_is_refused(install: ModuleType, tmp_path: Path) -> None:
    """pip's own doing: with a wheel of torch's name that holds something else."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    name = f"torch-{install.TORCH.partition('==')[2]}-{tag}-{tag}-manylinux_2_28_x86_64.whl"
    (tmp_path / name).write_bytes(b"something else")
    command = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--no-index"]
    command += ["--require-hashes", f"--find-links={tmp_path}", "-r", str(install.TORCH_LOCK)]
    command += ["--platform=manylinux_2_28_x86_64", "--only-binary=:all:", f"--dest={tmp_path}/d"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "HASHES" in done.stderr
