"""Recipes' files: the shipped ones, a user's own, and errors that name file, field and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracegrad.proxy.dialects.registry import DIALECTS
from tracegrad.runner.recipe import SHIPPED
from tracegrad.runner.recipe_files import (
    PLACEHOLDERS,
    RecipeError,
    find_recipe,
    is_recipe,
    load_recipe,
    recipe_paths,
)

GOOD = """
name = "mine"
version = "1.0"
dialect = "chat"
installer = "pip"
packages = ["mine=={version}"]
command = ["mine", "--task={prompt}"]
"""
WORDS = '["mine", "--task={prompt}"]'
ALL = {
    "claude-code", "codex", "gemini-cli", "mini-swe-agent", "opencode", "qwen-code",
}  # fmt: skip


def written(folder: Path, text: str, name: str = "mine") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_shipped_ones_are_whole(name: str, tmp_path: Path) -> None:
    recipe = find_recipe(name, tmp_path)
    assert recipe.name == name
    assert recipe.dialect in DIALECTS
    assert recipe.lock is not None
    assert recipe.version in " ".join(recipe.packages)
    assert recipe.traps
    assert recipe.about


def test_the_shipped_ones_are_these(tmp_path: Path) -> None:
    assert set(recipe_paths(tmp_path)) == ALL
    assert {path.stem for path in SHIPPED.glob("*.toml")} == ALL


def test_a_users_own_goes_first_and_tables_become_json(tmp_path: Path) -> None:
    own = tmp_path / "recipes"
    text = GOOD.replace('"mine"', '"codex"', 1)
    written(own, text + '[files."a.json"]\nb.c = "{model}"\n[environ]\nX = "1"\n', "codex")
    recipe = find_recipe("codex", own)
    assert recipe.installer == "pip"
    assert recipe.files == {"a.json": '{"b": {"c": "{model}"}}'}
    assert recipe.environ == {"X": "1"}
    assert find_recipe("opencode", own).path == SHIPPED / "opencode.toml"


def test_another_version_is_asked_for_by_name(tmp_path: Path) -> None:
    own = find_recipe("codex", tmp_path)
    other = find_recipe("codex@0.170.1", tmp_path)
    assert other.packages == ("@openai/codex@0.170.1",)
    assert other.id == "codex@0.170.1"
    assert other.lock is None  # it pins the shipped version
    assert find_recipe(f"codex@{own.version}", tmp_path) == own
    with pytest.raises(RecipeError, match=r"codex@../x"):
        find_recipe("codex@../x", tmp_path)


def test_by_path(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "other")
    assert find_recipe(str(path)).name == "mine"
    assert is_recipe("./anything.toml")
    assert is_recipe("codex", tmp_path)
    assert not is_recipe("mybot", tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("version", "verison"), "verison: there is no such field; did you mean version?"),
        (('version = "1.0"', ""), "version: it is missing; write the agent's"),
        (('"1.0"', "1.0"), "version: 1.0 is no text; write the agent's"),
        (('"1.0"', '"../../x"'), "version: '../../x' cannot be one; write the agent's"),
        (('"mine"', '"My Agent"'), "name: 'My Agent' cannot be one; write small letters"),
        (('"chat"', '"openai"'), 'dialect: \'openai\' cannot be one; write one of "chat", "compl'),
        (('"pip"', '"brew"'), "installer: 'brew' cannot be one; write one of"),
        ((WORDS, '"mine {prompt}"'), "command: .* is no list of texts; write a list of words"),
        ((WORDS, '["mine", 3, "{prompt}"]'), "command: .* is no list of texts; write a list"),
        ((WORDS, "[]"), "command: it is empty; write a list of words"),
        (("{prompt}", "hello"), r"command: the agent would not hear its task; put \{prompt\}"),
        (("{prompt}", "{promt}"), r"command\.1: \{promt\} stands for nothing; did you mean"),
        (('["mine=={version}"]', "[]"), "packages: pip has nothing to install; name it there"),
        (('"pip"', '"shell"'), "shell: shell has nothing to install; name it there"),
        (('"pip"', '"none"\nlock = "x"'), "lock: none reads none; leave it out"),
        (('"pip"', '"pip"\nlock = "x"'), "lock: .*x is not there; its path is relative to the"),
        (('"pip"', '"pip"\nhome = "no"'), "home: 'no' is neither; write true or false"),
        (('"pip"', '"pip"\nhome = false\nfiles.a = "b"'), "files: .*; write home = true, or abs"),
        (('"pip"', '"pip"\nenviron.A = 1'), "environ: A = 1 is no text; write variables, such"),
        (('"pip"', '"pip"\nfiles = "x"'), "files: 'x' is no table; write texts by their path"),
        (('"pip"', '"pip"\nneeds = "git"'), "needs: .*; write a list of programs"),
        (('"pip"', '"pip"\ntraps = [{what = "x"}]'), r"traps: .* has not both.*; write \[\[traps"),
        (("name =", "name"), "no TOML: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_file_field_and_fix(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, GOOD.replace(*change))
    with pytest.raises(RecipeError, match=f"^{path}: {said}") as error:
        load_recipe(path)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nothing\.toml: No such file"):
        find_recipe(str(tmp_path / "nothing.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"bytes\.toml: no TOML"):
        find_recipe(str(tmp_path / "bytes.toml"))
    with pytest.raises(RecipeError, match=r"codx: there is no recipe .* did you mean codex\?"):
        find_recipe("codx", tmp_path)
    with pytest.raises(RecipeError, match=r"zzz: .* there are bytes, claude-code, .*zzz\.toml"):
        find_recipe("zzz", tmp_path)


def test_a_file_of_another_name_than_it_says_is_refused(tmp_path: Path) -> None:
    written(tmp_path, GOOD, "copy")
    with pytest.raises(RecipeError, match=r"copy\.toml: name: 'mine' is not the file"):
        find_recipe("copy", tmp_path)


def test_all_placeholders_are_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    assert all(f"`{{{name}}}`" in page for name in PLACEHOLDERS)
