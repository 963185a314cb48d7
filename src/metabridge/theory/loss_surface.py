"""Loss surfaces of students with a single neuron of two weights, and their minima (Collins et al. 2022, §4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from metabridge.environments.teacher_networks import Activation, teacher_output
from metabridge.episodes import Episodes
from metabridge.models.network import Params
from metabridge.solvers import GradientDescent, Problem, task_loss

EXTENT = 2.0  # surfaces cover −2 to 2 along both axes
SEARCH_POINTS = 25  # points per axis of the grid whose best point is the start of the search for a minimum
PRECISION = 1e-4  # of the position of a minimum


@dataclass(frozen=True, eq=False)
class LossSurface:
    """The mean query loss on fixed episodes as a function of the student's neuron.

    Args:
        activation: Activation of student and teachers.
        episodes: The episodes.
        lr: Step size of one gradient step on the support set before the query loss; None for no adaptation.

    Example:
        >>> from metabridge.environments import TeacherTasks
        >>> from metabridge.environments.teacher_networks import FixedNeurons
        >>> environment = TeacherTasks(FixedNeurons(torch.tensor([[[1.0, 0.0]]])), "relu", shots=5, queries=5)
        >>> surface = LossSurface("relu", environment.sample(3, torch.Generator().manual_seed(0)))
        >>> surface(torch.tensor([1.0, 0.0])).item()
        0.0
    """

    activation: Activation
    episodes: Episodes
    lr: float | None = None

    def __call__(self, neurons: Tensor) -> Tensor:
        """Return the loss of each neuron.

        Args:
            neurons: Neurons of the student, (..., 2).

        Returns:
            The losses, (...).
        """

        def apply(params: Params, x: Tensor) -> Tensor:
            return teacher_output(self.activation, params["neurons"], x)

        def loss(neuron: Tensor, support_x: Tensor, support_y: Tensor, query_x: Tensor, query_y: Tensor) -> Tensor:
            student = {"neurons": neuron[None]}
            if self.lr is not None:
                problem = Problem(apply, task_loss, support_x, support_y)
                student = GradientDescent(steps=1, lr=self.lr).solve(problem, student, {}, exact=False)
            return task_loss(apply(student, query_x), query_y)

        losses = vmap(vmap(loss, (None, 0, 0, 0, 0)), (0, None, None, None, None), chunk_size=32)
        return losses(neurons.reshape(-1, 2), *self.episodes.tensors()).mean(1).reshape(neurons.shape[:-1])

    def minimum(self) -> Tensor:
        """Return the neuron with the lowest loss, by a pattern search from the best point of a grid.

        The search does not use gradients: with ReLU, the gradient jumps where ⟨neuron, x⟩ is 0 for a support input x,
        so the loss after a gradient step is discontinuous in the neuron.

        Returns:
            The neuron, (2).
        """
        grid = neuron_grid(SEARCH_POINTS).reshape(-1, 2)
        offsets = neuron_grid(5).reshape(-1, 2) / EXTENT  # 5 × 5 points from −1 to 1 along both axes
        spacing = 2 * EXTENT / (SEARCH_POINTS - 1)
        losses = self(grid)
        best, best_loss = grid[losses.argmin()], losses.min()
        while spacing > PRECISION:
            candidates = best + spacing * offsets
            losses = self(candidates)
            if losses.min() < best_loss:
                best, best_loss = candidates[losses.argmin()], losses.min()
            else:
                spacing /= 2
        return best


def neuron_grid(points_per_axis: int) -> Tensor:
    """Return a square grid of neurons from −2 to 2 along both axes.

    Args:
        points_per_axis: Number of points along each axis.

    Returns:
        The neurons, (points_per_axis, points_per_axis, 2). The first coordinate varies along the first axis.

    Example:
        >>> neuron_grid(3)[2, 0]
        tensor([ 2., -2.], dtype=torch.float64)
    """
    axis = torch.linspace(-EXTENT, EXTENT, points_per_axis, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis).reshape(points_per_axis, points_per_axis, 2)
