"""What bakes an agent into an image: folders that are copied in, and lines that are run once as
root. The result is committed, and no attempt installs anything.

Agents of npm bring their Node along, and those of pip the packages of this machine's cache where
the image has the same Python: no network is needed then.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tracegrad.runner.agent_install import REQUIREMENTS, InstalledAgent
from tracegrad.runner.recipe import Recipe

PREFIX = "/opt/tracegrad"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLayer:
    """`files` are copied in first: path inside -> folder of this machine. `lines`: for `sh -e`; the
    last words of one that fails say why."""

    id: str
    lines: tuple[str, ...]
    files: Mapping[str, Path] = field(default_factory=dict)


def starter(recipe: Recipe, prefix: str = PREFIX) -> str:
    """The program in the image that runs a command with the agent's programs in its PATH."""
    return f"{prefix}/{recipe.id}.sh"


def agent_layer(
    recipe: Recipe, installed: InstalledAgent | None, *, prefix: str = PREFIX
) -> AgentLayer:
    """`installed`: its programs on this machine; None for `apt` and `none`, which have none here.
    `prefix`: the folder inside that gets them."""
    own = f"{prefix}/{recipe.id}"
    files: dict[str, Path] = {}
    path = [f"{own}/node_modules/.bin", f"{own}/bin"]
    lines = [_needed(recipe, program) for program in recipe.needs]
    if installed is not None:
        files[own] = installed.folder
        if installed.node is not None:
            node = f"{prefix}/node"
            files[node] = installed.node
            path.append(f"{node}/bin")
            lines.append(f"{node}/bin/node --version >/dev/null || {_failed(recipe, _NO_NODE)}")
    if recipe.installer == "pip":
        lines.append(_moved_environment(recipe, own))
    if recipe.installer == "apt":
        lines += _apt(recipe, own)
    lines += [_write_starter(starter(recipe, prefix), path), f"chmod -R a+rX {shlex.quote(prefix)}"]
    return AgentLayer(id=recipe.id, files=files, lines=tuple(lines))


# What no agent imports of the standard library.
_NOT_COMPILED = r"/(test|tests|idlelib|lib2to3|ensurepip|turtledemo|site-packages|dist-packages)/"
_NO_NODE = "the image cannot run Node, which needs glibc 2.28 or later"
_NO_PYTHON = "the image has no Python 3"


def _needed(recipe: Recipe, program: str) -> str:
    said = f"the image has no {program}"
    return f"command -v {shlex.quote(program)} >/dev/null || {_failed(recipe, said)}"


def _failed(recipe: Recipe, said: str) -> str:
    line = f"{said}: {recipe.id} needs it; install it in the image's Dockerfile"
    return f"{{ echo {shlex.quote(line)} >&2; exit 1; }}"


def _apt(recipe: Recipe, own: str) -> Iterator[str]:
    yield "export DEBIAN_FRONTEND=noninteractive"
    yield "apt-get update -q"
    yield f"apt-get install -qy --no-install-recommends {shlex.join(recipe.packages)}"
    yield f"mkdir -p {own}/bin && cd {own} && export PREFIX={own}"
    yield from recipe.shell


def _moved_environment(recipe: Recipe, own: str) -> str:
    """A virtual environment names its Python and its own folder in its files: both are others in
    the image; pip writes paths that are too long for a first line into the second. Under another
    Python than this one's all is installed anew, by the image's network.
    """
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    packages = shlex.join(recipe.packages)
    if recipe.lock is not None:
        packages = f"--no-deps --require-hashes -r {own}.txt"
    # What is found in PATH may be another program that starts it (pyenv's). Official images of
    # Python come without byte code, and those who run agents may not write any: each attempt would
    # compile what it imports of the standard library.
    return f"""\
python=$(command -v python{version} || command -v python3) || {_failed(recipe, _NO_PYTHON)}
if [ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = {version} ]; then
    python=$("$python" -c 'import sys; print(sys._base_executable)')
    for name in python python3 python{version}; do ln -sf "$python" {own}/bin/$name; done
    sed -i "s|^home = .*|home = $(dirname "$python")|" {own}/pyvenv.cfg
    for file in {own}/bin/*; do
        [ -L "$file" ] || [ -d "$file" ] ||
            sed -i -e '1s|^#!.*/bin/python.*|#!{own}/bin/python|' \\
                -e "2s|^'''exec' .*/bin/python[^ ]* |'''exec' {own}/bin/python |" "$file"
    done
    "$python" -m compileall -q -x '{_NOT_COMPILED}' \\
        "$("$python" -c 'import os; print(os.path.dirname(os.__file__))')" >/dev/null || true
else
    if [ -f {own}/{REQUIREMENTS} ]; then cp {own}/{REQUIREMENTS} {own}.txt; fi
    rm -rf {own}
    "$python" -m venv {own}
    {own}/bin/python -m pip install --no-input {packages}
fi"""


def _write_starter(target: str, path: list[str]) -> str:
    text = f"""\
#!/bin/sh
mkdir -p "$HOME" 2>/dev/null
PATH={":".join(path)}:$PATH
export PATH
exec "$@"
"""
    folder, own = shlex.quote(str(Path(target).parent)), shlex.quote(target)
    return f"mkdir -p {folder}; printf %s {shlex.quote(text)} > {own}; chmod 755 {own}"
