"""What bakes agents into images: its lines are run here, in a folder in place of an image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tracegrad.runner.agent_install import InstalledAgent, install_agent
from tracegrad.runner.agent_layer import AgentLayer, agent_layer, starter
from tracegrad.runner.recipe import Recipe

TOY = Recipe(
    name="toy",
    version="1.0",
    dialect="chat",
    installer="shell",
    shell=("printf '#!/bin/sh\\necho toy \"$@\"' > bin/toy; chmod +x bin/toy",),
    command=("toy", "{prompt}"),
    needs=("sh",),
)


def baked(layer: AgentLayer, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`first`: goes before the folders of PATH."""
    for inside, folder in layer.files.items():
        shutil.copytree(folder, inside, symlinks=True)
    path = os.pathsep.join([*([str(first)] if first else []), os.environ["PATH"]])
    return subprocess.run(
        ["/bin/sh", "-ec", "\n".join(layer.lines)],
        env={"PATH": path, "PYTHONPYCACHEPREFIX": f"{prefix_of(layer)}.byte-code"},
        capture_output=True,
        text=True,
        check=False,
    )


def prefix_of(layer: AgentLayer) -> str:
    """Of the one folder that is copied in, where there is one."""
    return next(iter(layer.files), "/nowhere")


def said(recipe: Recipe, prefix: str, *command: str, **environ: str) -> str:
    return subprocess.check_output(
        [starter(recipe, prefix), *command],
        env={"PATH": "/usr/bin:/bin", "HOME": f"{prefix}/home", **environ},
        text=True,
    )


def test_its_programs_are_found_and_there_is_a_home(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/image"
    layer = agent_layer(TOY, install_agent(TOY, tmp_path / "cache"), prefix=prefix)
    done = baked(layer)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "cache")
    assert said(TOY, prefix, "toy", "two words", "$HOME") == "toy two words $HOME\n"
    assert said(TOY, prefix, "sh", "-c", "toy; cd; pwd") == f"toy\n{prefix}/home\n"
    assert layer.id == "toy@1.0"


def test_an_environment_of_pip_is_moved_to_the_images_python(tmp_path: Path) -> None:
    pip = replace(TOY, installer="pip", packages=("toy==1.0",))
    folder, prefix = tmp_path / "cache" / "toy", f"{tmp_path}/image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "lib" / version / "site-packages" / "toy.py").write_text("import sys; P = sys.prefix")
    script = folder / "bin" / "toy"
    script.write_text(f"#!{folder}/bin/python\nimport toy\nprint(toy.P)\n")
    script.chmod(0o755)
    # As pip writes it where the path is longer than a first line may be.
    far = folder / "bin" / "far"
    far.write_text(f"""#!/bin/sh
'''exec' {folder}/bin/python "$0" "$@"
' '''
import sys, toy
print(toy.P, *sys.argv[1:])
""")
    far.chmod(0o755)
    layer = agent_layer(pip, InstalledAgent(folder), prefix=prefix)
    done = baked(layer)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder)
    byte_code = {
        path.name.split(".")[0] for path in Path(f"{prefix_of(layer)}.byte-code").rglob("*")
    }
    assert {"argparse", "decoder"} <= byte_code
    assert said(pip, prefix, "toy") == f"{prefix}/toy@1.0\n"
    assert said(pip, prefix, "far", "two words") == f"{prefix}/toy@1.0 two words\n"


def test_under_another_python_it_is_installed_anew(tmp_path: Path) -> None:
    pip = replace(TOY, installer="pip", packages=("toy==1.0",), lock=tmp_path / "lock.txt")
    folder, prefix = tmp_path / "cache" / "toy", f"{tmp_path}/image"
    (folder / "bin").mkdir(parents=True)
    (folder / "requirements.txt").write_text("toy==1.0 --hash=sha256:0\n")
    (folder / "gone").touch()
    # A Python of another version, whose environments note what pip is asked for.
    python = tmp_path / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && { echo 2.7; exit; }\nmkdir -p "$3/bin"\n'
        'printf \'#!/bin/sh\\necho "$@" > "$(dirname "$0")/asked"\' > "$3/bin/python"\n'
        'chmod +x "$3/bin/python"\n'
    )
    python.chmod(0o755)
    done = baked(agent_layer(pip, InstalledAgent(folder), prefix=prefix), python.parent)
    assert done.returncode == 0, done.stderr
    own = f"{prefix}/toy@1.0"
    asked = Path(own, "bin", "asked").read_text()
    assert asked == f"-m pip install --no-input --no-deps --require-hashes -r {own}.txt\n"
    assert Path(f"{own}.txt").read_text() == "toy==1.0 --hash=sha256:0\n"
    assert not Path(own, "gone").exists()


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (replace(TOY, needs=("no-such-program",)), "the image has no no-such-program"),
        (replace(TOY, installer="npm"), "the image cannot run Node, which needs glibc 2.28"),
    ],
)
def test_an_image_that_lacks_something_is_told_in_one_line(
    recipe: Recipe, why: str, tmp_path: Path
) -> None:
    (tmp_path / "node").mkdir()
    installed = InstalledAgent(tmp_path / "node", node=tmp_path / "node")
    done = baked(agent_layer(recipe, installed, prefix=f"{tmp_path}/image"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"{why}")
    assert done.stderr.endswith("toy@1.0 needs it; install it in the image's Dockerfile\n")


def test_what_apt_installs_is_installed_in_the_image(tmp_path: Path) -> None:
    apt = replace(TOY, installer="apt", packages=("tmux", "git"), shell=("touch $PREFIX/done",))
    layer = agent_layer(apt, None, prefix=f"{tmp_path}/image")
    assert not layer.files
    assert "apt-get install -qy --no-install-recommends tmux git" in layer.lines
    shell = "\n".join(line for line in layer.lines if "apt-get" not in line)
    subprocess.run(["/bin/sh", "-ec", shell], check=True)
    assert Path(tmp_path, "image", "toy@1.0", "done").exists()
    assert said(apt, f"{tmp_path}/image", "echo", "x") == "x\n"
