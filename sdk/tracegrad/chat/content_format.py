"""Whether a template takes a message's content as a list of parts, judged as vLLM judges it.

vLLM 0.32 (`renderers/hf.py`) looks for a loop over a message's content in the template's syntax
tree. The rules are followed to the letter, odd ones too: where the engine errs, so must we.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from jinja2 import nodes


def iterates_content(template: nodes.Template) -> bool:
    """False as well where vLLM cannot make out the tree: it then assumes strings."""
    try:
        return next(_content_loops(template), None) is not None
    except _UnusualTarget:
        return False


class _UnusualTarget(Exception):
    """A loop or an assignment over messages with a target that is no plain name."""


def _content_loops(template: nodes.Template) -> Iterator[nodes.For]:
    messages = _message_names(template)
    in_macros, parameters = _macro_loops(template, messages)
    for loop in template.find_all(nodes.For):
        over = loop.iter
        named = over.name if isinstance(over, nodes.Name) else None
        if (
            any(_reads(over, name, "content") for name in messages)
            or named in parameters[id(loop)]
            or (named == "content" and id(loop) not in in_macros)
        ):
            _name(loop.target)
            yield loop


def _macro_loops(
    template: nodes.Template, messages: list[str]
) -> tuple[set[int], defaultdict[int, set[str]]]:
    """Ids of the loops inside macros, and by loop the macro's parameters that get a content."""
    in_macros: set[int] = set()
    parameters: defaultdict[int, set[str]] = defaultdict(set)
    calls = list(template.find_all(nodes.Call))
    for macro in template.find_all(nodes.Macro):
        given = _content_parameters(macro, calls, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if given:
                parameters[id(loop)] = given
    return in_macros, parameters


def _content_parameters(
    macro: nodes.Macro, calls: list[nodes.Call], messages: list[str]
) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    given: set[str] = set()
    for call in calls:
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        by_name = [(keyword.key, keyword.value) for keyword in call.kwargs]
        for name, value in [*zip(names, call.args, strict=False), *by_name]:
            if name in names and any(_reads(value, message, "content") for message in messages):
                given.add(name)
    return given


def _message_names(template: nodes.Template) -> list[str]:
    """The names that loops over the messages give to a message."""
    lists = _aliases(template, "messages")
    return [
        _name(loop.target)
        for loop in template.find_all(nodes.For)
        if any(_reads(loop.iter, name) for name in lists)
    ]


def _aliases(template: nodes.Template, name: str) -> list[str]:
    """`name` and whatever it, or a slice or filter of it, is assigned to."""
    found = [name]
    for known in found:
        for assignment in template.find_all(nodes.Assign):
            if _reads(assignment.node, known) and (target := _name(assignment.target)) not in found:
                found.append(target)
    return found


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable (its item `key`), perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _is_variable(node.node, name)
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == key
        and _is_variable(node.node, name)
    )


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnusualTarget
    return target.name
