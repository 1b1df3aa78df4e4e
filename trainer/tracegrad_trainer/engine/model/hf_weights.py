"""A model folder's safetensors under the names of the model's own tensors, read by parts.

Files differ from models: transformers renames tensors as it loads them, stacks a mixture's experts,
splits or joins others (transformers.core_model_loading). Its rules are applied here to the part of
a tensor that is asked for. Reading is by pread of just these bytes: safetensors' own reader maps
files into memory, where all that was read stays, or reads tensors whole.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tracegrad_trainer.engine.model.safetensors_files import read_header, weight_files

Index = tuple[slice, ...]
_COMPARED = 1 << 26  # elements of tied tensors that are compared at a time
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_AGAIN = "download it again"
_log = logging.getLogger(__name__)


class HfWeights:
    """The tensors of a folder that a model is made of; nothing but headers is read at first."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        """`model` is as transformers makes it, on any device; not sharded, without adapters. It
        keeps the rules that were used, for exports (`as_hf_tensors`).

        Raises:
            ValueError: the files cannot be read, or are not those of this model: a tensor is
                missing, of another shape, or there twice with different values.
        """
        self._folder = folder
        self._model: Any = model
        self._expected: dict[str, Tensor] = model.state_dict()  # with all names of tied ones
        self._parts: dict[str, _FileTensor | _Converted] = {}
        self.untrained: list[str] = []  # names of the files' tensors that are no part of the model
        try:
            self._assign(_read_headers(folder))
        except (OSError, ValueError) as error:
            raise ValueError(f"model = {str(folder)!r} cannot be loaded: {error}") from error
        self._check()

    def read(self, name: str, index: Index) -> Tensor:
        """The part `index` of the model's tensor `name` (any of its names, if it is tied), on the
        host, in the files' precision.

        Raises:
            ValueError: it cannot be read, or has another shape.
        """
        name = next(one for one in self._aliases(name) if one in self._parts)
        try:
            return self._parts[name].read(index)
        except (OSError, RuntimeError, KeyError, IndexError) as error:
            raise ValueError(
                f"model = {str(self._folder)!r}: {name} cannot be read: {error}"
            ) from error

    def _assign(self, sources: dict[str, _FileTensor]) -> None:
        """Which of the files' tensors make up which of the model's."""
        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix, unknown = self._model.base_model_prefix, []
        groups: dict[str, _Group] = {}
        for key in sorted(sources, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, self._expected)
            if name not in self._expected and key in self._expected:  # it is in the model's words
                name, pattern = rename_source_key(key, [], [], prefix, self._expected)
            if name not in self._expected:
                unknown.append(key)
                continue
            held, asked = sources[key].dtype, self._expected[name].dtype
            if asked.is_floating_point and not held.is_floating_point:
                raise ValueError(
                    f"{key} is {held}, as of quantized models, but config.json has no"
                    " quantization_config: convert the files to bfloat16"
                )
            if pattern is None:
                self._parts[name] = sources[key]
            else:
                rule = by_pattern[pattern]
                group = groups.setdefault(name, _Group(rule, name, self._model))
                group.sources[pattern].append(sources[key])
        for group in groups.values():
            for name in group.targets:
                if name in self._expected:
                    self._parts[name] = _Converted(group, name, self._expected[name].shape)
        self._model._weight_conversions = [rule for rule in rules if rule.was_used()]
        self.untrained = [key for key in unknown if not re.search(r"rotary_emb\.inv_freq", key)]
        self._say_untrained()

    def _say_untrained(self) -> None:
        ignored = self._model._keys_to_ignore_on_load_unexpected or ()
        left = [key for key in self.untrained if not any(re.search(one, key) for one in ignored)]
        if left:
            _log.warning(
                "model = %r: %d of its tensors are no part of %s and are not trained (the first:"
                " %s)",
                str(self._folder),
                len(left),
                type(self._model).__name__,
                left[0],
            )

    def _check(self) -> None:
        where = f"model = {str(self._folder)!r}"
        missing = [
            name
            for name in self._expected
            if not any(one in self._parts for one in self._aliases(name))
        ]
        if missing:
            raise ValueError(f"{where}: {missing_tensors(missing)}")
        for name, part in self._parts.items():
            found, asked = part.shape, list(self._expected[name].shape)
            if found is not None and found != asked:
                raise ValueError(
                    f"{where}: {name} has the shape {found} in its files and {asked} by its"
                    " config.json: they do not belong together"
                )
            for other in self._aliases(name):
                if name < other and other in self._parts and self._differ(name, other):
                    raise ValueError(
                        f"{where}: its config ties {name} and {other}, and its files hold both with"
                        " different values: set tie_word_embeddings to false in its config.json"
                    )

    def _aliases(self, name: str) -> list[str]:
        """All names of a tensor."""
        tied: dict[str, str] = self._model.all_tied_weights_keys  # name -> that of its source
        source = tied.get(name, name)
        return [source, *(one for one, of in tied.items() if of == source)]

    def _differ(self, a: str, b: str) -> bool:
        first, second = self._parts[a], self._parts[b]
        rows, *others = self._expected[a].shape
        step = max(1, _COMPARED // max(1, torch.Size(others).numel()))
        spans = [(slice(i, min(rows, i + step)),) for i in range(0, rows, step)]
        return any(not torch.equal(first.read(one), second.read(one)) for one in spans)


def readable_by_parts(folder: Path, config: Any) -> bool:
    """Whether a model's weights are safetensors in the precisions that torch computes in."""
    return not getattr(config, "quantization_config", None) and _holds(folder, "model.safetensors")


def loaded_whole(folder: Path, config: Any) -> bool:
    """Whether every rank loads the whole model first. A folder without weights (a config alone,
    for estimates) is taken for one that has safetensors."""
    other = _holds(folder, "pytorch_model.bin") or next(folder.glob("*.safetensors"), None)
    quantized = getattr(config, "quantization_config", None)
    return bool(quantized or other) and not readable_by_parts(folder, config)


def _holds(folder: Path, name: str) -> bool:
    """As one file, or in many with an index."""
    return any((folder / one).is_file() for one in (name, f"{name}.index.json"))


def missing_tensors(missing: Sequence[str]) -> str:
    return (
        f"its files lack {len(missing)} of the tensors that its config.json asks for (the first:"
        f" {missing[0]}): {_AGAIN}, or correct its config.json"
    )


@dataclass(frozen=True, slots=True)
class _FileTensor:
    """A tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: list[int]
    begins: int  # bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: Index = ()) -> Tensor:
        rows, *others = self.shape or [1]
        first, last, _ = index[0].indices(rows) if index else (0, rows, 1)
        width = torch.Size(others).numel() * self.dtype.itemsize  # bytes of a row
        taken = torch.empty(max(0, last - first) * width, dtype=torch.uint8)
        self._fill(memoryview(taken.numpy().data), self.begins + first * width)
        found = taken.view(self.dtype).view([max(0, last - first), *others])
        return found[(slice(None), *index[1:])] if self.shape else found[0]

    def _fill(self, left: memoryview, begins: int) -> None:
        with self.path.open("rb", buffering=0) as file:
            while left:
                count = os.preadv(file.fileno(), [left], begins)
                if count == 0:
                    raise OSError(f"{self.path} ends early")
                left, begins = left[count:], begins + count


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of the files from which one rule makes one or more of the model's."""

    rule: WeightConverter
    name: str  # of the first that it makes
    model: Any
    sources: dict[str, list[_FileTensor]] = field(
        default_factory=lambda: defaultdict(list)
    )  # by pattern

    @property
    def targets(self) -> list[str]:
        first, *others = self.rule.target_patterns
        return [self.name, *(self.name.replace(first, other) for other in others)]

    def convert(self, experts: slice = slice(None)) -> dict[str, Tensor]:
        """What the rule makes, by name; of `experts` alone where each has tensors of its own."""
        rule = copy.deepcopy(self.rule)
        for pattern, slices in self.sources.items():
            for source in slices[experts]:
                rule.add_tensor(self.name, "", pattern, source.read())
        made: dict[str, Any] = rule.convert(self.name, model=self.model, config=self.model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    @property
    def by_expert(self) -> bool:
        """Whether each of the files' tensors ends up in a row of its own, of all that are made."""
        stack, *others = self.rule.operations
        return (
            isinstance(stack, MergeModulelist)
            and stack.dim == 0
            and all(
                isinstance(op, Chunk | Concatenate | Interleave) and op.dim > 0 for op in others
            )
        )


@dataclass(frozen=True, slots=True)
class _Converted:
    """A tensor that a rule makes of others: of a mixture the own experts are read, of any other
    rule's tensors all."""

    group: _Group
    name: str
    expected: torch.Size

    @property
    def shape(self) -> list[int] | None:
        """Known before it is read: the number of experts; of gates or ups, where they differ, the
        wrong one."""
        if not self.group.by_expert:
            return None
        sources, experts = self.group.sources, self.expected[0]
        counts = [len(sources.get(one, ())) for one in self.group.rule.source_patterns]
        wrong = [count for count in counts if count != experts]
        return [*(wrong or [experts])[:1], *self.expected[1:]]

    def read(self, index: Index) -> Tensor:
        if not self.group.by_expert:
            return self._checked(self.group.convert()[self.name], self.expected[0])[index]
        experts, *others = index
        own = len(range(*experts.indices(self.expected[0])))
        if own == 0:  # more ranks than experts: nothing could be stacked
            return torch.empty(0, *self.expected[1:])[(slice(None), *others)]
        return self._checked(self.group.convert(experts)[self.name], own)[(slice(None), *others)]

    def _checked(self, made: Tensor, rows: int) -> Tensor:
        asked = [rows, *self.expected[1:]]
        if list(made.shape) != asked:
            raise RuntimeError(f"its shape is {list(made.shape)}, and {asked} by its config.json")
        return made


def _read_headers(folder: Path) -> dict[str, _FileTensor]:
    """Name in the files -> tensor."""
    found: dict[str, _FileTensor] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            header = read_header(file)
        size = path.stat().st_size
        for name, (dtype, shape, begins, ends) in header.items():
            if dtype not in _DTYPES:
                raise ValueError(
                    f"{path} has a tensor of the type {dtype}: {name}; convert it to bfloat16"
                )
            tensor = _FileTensor(path, _DTYPES[dtype], shape, begins)
            # Here, before any rank reads: later the others would wait for the one that fails.
            if ends > size:
                raise ValueError(f"{path} ends early ({size} bytes, {name} up to {ends}): {_AGAIN}")
            if ends - begins != tensor.nbytes:
                raise ValueError(f"{path} holds {ends - begins} bytes of {name}: {_AGAIN}")
            found[name] = tensor
    return found
