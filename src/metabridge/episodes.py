"""A batch of tasks: each has a support set, on which a method adapts, and a query set, on which it is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metabridge.errors import InputError, describe
from metabridge.html_table import html_table


@dataclass(frozen=True, eq=False, repr=False)
class Episodes:
    """The support and query sets of several tasks. The first dimension of every tensor indexes the tasks.

    Inputs have shape (tasks, examples, ...) and are floating point, or int64 for networks that take indices. Targets
    are class labels (int64 of shape (tasks, examples)) or regression targets (floating point of shape (tasks, examples,
    outputs)).

    Args:
        support_x: Inputs of the support sets.
        support_y: Targets of the support sets.
        query_x: Inputs of the query sets.
        query_y: Targets of the query sets.
        classes: The rows of the shared head that compute each task's outputs, int64 indices of shape (tasks, outputs).
            A row belongs to a training class or, if every task has its own head, to a task. Only multi-task methods
            need it.

    Raises:
        InputError: If dtypes or shapes do not match.

    >>> import torch
    >>> import metabridge as mb
    >>> x, y = torch.randn(4, 5, 3), torch.randint(0, 5, (4, 5))
    >>> episodes = mb.Episodes(support_x=x, support_y=y, query_x=x, query_y=y)
    >>> len(episodes), len(episodes[1:3])
    (4, 2)
    """

    support_x: Tensor
    support_y: Tensor
    query_x: Tensor
    query_y: Tensor
    classes: Tensor | None = None

    def __post_init__(self) -> None:
        _check_set("support", self.support_x, self.support_y)
        _check_set("query", self.query_x, self.query_y)
        tasks = self.support_x.shape[0]
        if self.query_x.shape[0] != tasks:
            raise InputError(
                f"support_x has {tasks} tasks, but query_x has {self.query_x.shape[0]}. "
                "The first dimension of every tensor indexes the tasks, so its size must be the same in all tensors."
            )
        for name in ("x", "y"):
            support, query = getattr(self, f"support_{name}"), getattr(self, f"query_{name}")
            has_features = name == "x" or support.is_floating_point()
            if support.dtype != query.dtype or (has_features and support.shape[2:] != query.shape[2:]):
                raise InputError(
                    f"support_{name} is {describe(support)}, but query_{name} is {describe(query)}. "
                    "Both sets must have the same dtype, and their examples the same shape."
                )
        classes = self.classes
        if classes is not None and (classes.dtype != torch.int64 or classes.ndim != 2 or classes.shape[0] != tasks):
            raise InputError(
                f"classes is {describe(classes)}, but must be int64 of shape ({tasks}, outputs): "
                "the index of a row of the shared head for each output of each task."
            )

    def __len__(self) -> int:
        return self.support_x.shape[0]

    def __getitem__(self, tasks: int | slice) -> Episodes:
        """Return the selected tasks; an integer selects one task and keeps the task dimension."""
        if isinstance(tasks, int):
            if not -len(self) <= tasks < len(self):
                raise IndexError(f"task index {tasks} is out of range for {len(self)} tasks")
            tasks = slice(tasks, tasks + 1 or None)
        return self.map(lambda tensor: tensor[tasks])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Episodes:
        """Move all tensors to a device, and convert floating-point tensors to a dtype.

        Args:
            device: Device of all tensors (default: unchanged).
            dtype: Dtype of the floating-point tensors (default: unchanged).

        Returns:
            The converted episodes.
        """
        return self.map(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))

    def clone(self) -> Episodes:
        """Return a copy in which every tensor is cloned."""
        return self.map(torch.clone)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.support_x.device

    @property
    def is_classification(self) -> bool:
        """Whether targets are class labels."""
        return not self.support_y.is_floating_point()

    @property
    def is_split(self) -> bool:
        """Whether support and query sets are separate; false if both are the same tensors."""
        return self.query_x is not self.support_x or self.query_y is not self.support_y

    @classmethod
    def split(cls, x: Tensor, y: Tensor, shots: int, classes: Tensor | None = None) -> Episodes:
        """Split the examples of every task into a support and a query set.

        Args:
            x: Inputs of all examples, (tasks, examples, ...).
            y: Targets of all examples.
            shots: Number of examples per support set. The first examples of each task are its support set.
            classes: The rows of the shared head that compute each task's outputs; see `Episodes`.

        Returns:
            The episodes.

        >>> Episodes.split(torch.randn(4, 12, 3), torch.randn(4, 12, 1), shots=5).query_x.shape
        torch.Size([4, 7, 3])
        """
        return cls(x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:], classes)

    @classmethod
    def concatenate(cls, parts: Sequence[Episodes]) -> Episodes:
        """Concatenate the tasks of several batches.

        Args:
            parts: Batches whose tensors differ in shape only in the number of tasks.

        Returns:
            One batch that contains the tasks of all parts.
        """
        if len(parts) == 1:
            return parts[0]
        tensors = [torch.cat(field_tensors) for field_tensors in zip(*(part.tensors() for part in parts))]
        # If `is_split` is false, `tensors()` omits the query sets, which are then the support sets.
        return cls(*tensors) if parts[0].is_split else cls(*tensors[:2], *tensors)

    def without_split(self) -> Episodes:
        """Merge support and query sets: use all examples of a task as both sets (Wang et al. 2021, eq. 3).

        Returns:
            The episodes; unchanged if `is_split` is false.
        """
        if not self.is_split:
            return self
        x = torch.cat([self.support_x, self.query_x], dim=1)
        y = torch.cat([self.support_y, self.query_y], dim=1)
        return replace(self, support_x=x, support_y=y, query_x=x, query_y=y)

    def __repr__(self) -> str:
        support, query = self.support_x.shape[1], self.query_x.shape[1]
        kind = "classification" if self.is_classification else "regression"
        shape = tuple(self.support_x.shape[2:])
        return f"Episodes({len(self)} {kind} tasks, {support} support and {query} query examples of shape {shape})"

    def _repr_html_(self) -> str:
        """Return a table of the support and query sets, for notebooks."""
        rows = [
            ("support", describe(self.support_x), describe(self.support_y)),
            ("query", describe(self.query_x), describe(self.query_y)),
        ]
        return html_table(repr(self), ("set", "inputs", "targets"), rows)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors: support_x and support_y, query_x and query_y if `is_split`, and classes if not None."""
        sets = (self.support_x, self.support_y) + ((self.query_x, self.query_y) if self.is_split else ())
        return sets if self.classes is None else (*sets, self.classes)

    def map_inputs(self, function: Callable[[Tensor], Tensor]) -> Episodes:
        """Apply `function` to the inputs of each set.

        Args:
            function: Maps inputs of shape (tasks, examples, ...) to inputs with the same first two dimensions.

        Returns:
            The episodes.
        """
        x = function(self.support_x)
        return replace(self, support_x=x, query_x=function(self.query_x) if self.is_split else x)

    def map_targets(self, function: Callable[[Tensor], Tensor]) -> Episodes:
        """Apply `function` to the targets of each set.

        Args:
            function: Maps targets of shape (tasks, examples, ...) to targets with the same first two dimensions.

        Returns:
            The episodes.
        """
        y = function(self.support_y)
        return replace(self, support_y=y, query_y=function(self.query_y) if self.is_split else y)

    def map(self, function: Callable[[Tensor], Tensor]) -> Episodes:
        """Apply `function` to every tensor.

        Args:
            function: Maps a tensor whose first dimension indexes the tasks to another such tensor.

        Returns:
            The episodes.
        """
        x, y = function(self.support_x), function(self.support_y)
        query = (function(self.query_x), function(self.query_y)) if self.is_split else (x, y)
        return Episodes(x, y, *query, None if self.classes is None else function(self.classes))


def _check_set(name: str, x: Tensor, y: Tensor) -> None:
    if not (x.is_floating_point() or x.dtype == torch.int64):
        raise InputError(
            f"{name}_x is {describe(x)}, but inputs must be floating point, or int64 indices. Convert with .float()."
        )
    if x.ndim < 3:
        raise InputError(
            f"{name}_x is {describe(x)}, but must have shape (tasks, examples, features...). "
            f"For a single task use {name}_x[None]; for scalar inputs use {name}_x[..., None]."
        )
    ndim = 3 if y.is_floating_point() else 2
    if y.ndim != ndim or (ndim == 2 and y.dtype != torch.int64):
        raise InputError(
            f"{name}_y is {describe(y)}, but targets must be int64 labels of shape (tasks, examples) "
            "or floating-point values of shape (tasks, examples, outputs)."
        )
    if x.shape[:2] != y.shape[:2]:
        raise InputError(
            f"{name}_x has (tasks, examples) = {tuple(x.shape[:2])}, but {name}_y has {tuple(y.shape[:2])}. "
            "There must be one target per input."
        )
    if x.shape[1] == 0:
        raise InputError(f"{name}_x has no examples. Every task needs at least one {name} example.")
