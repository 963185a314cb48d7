"""Loss surfaces of students with a single neuron in the plane, and their minima (Collins et al. 2022, §4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from metabridge.environments.teacher_networks import Activation, neuron_sum
from metabridge.episodes import Episodes
from metabridge.models.network import Params
from metabridge.solvers import GradientDescent, Problem, task_loss

EXTENT = 2.0  # surfaces cover −2 to 2 along both axes
SEARCH_POINTS = 25  # grid points per axis; the search for a minimum starts from the one with the lowest loss
PRECISION = 1e-4  # of the position of a minimum


@dataclass(frozen=True, eq=False)
class LossSurface:
    """The mean loss on fixed episodes as a function of the student's neuron.

    Args:
        activation: Activation of student and teachers.
        episodes: The episodes.
        lr: Size of one gradient step on the support set before the query loss; None evaluates without adaptation.
    """

    activation: Activation
    episodes: Episodes
    lr: float | None = None

    def __call__(self, neurons: Tensor) -> Tensor:
        """Return the loss of each neuron, (..., 2) → (...)."""

        def apply(params: Params, x: Tensor) -> Tensor:
            return neuron_sum(self.activation, params["neurons"], x)

        def loss(neuron: Tensor, *task: Tensor) -> Tensor:
            student = {"neurons": neuron[None]}
            if self.lr is not None:
                problem = Problem(apply, task_loss, task[0], task[1])
                student = GradientDescent(steps=1, lr=self.lr).solve(problem, student, {}, exact=False)
            return task_loss(apply(student, task[2]), task[3])

        losses = vmap(vmap(loss, (None, 0, 0, 0, 0)), (0, None, None, None, None), chunk_size=32)
        return losses(neurons.reshape(-1, 2), *self.episodes.tensors()).mean(1).reshape(neurons.shape[:-1])

    def minimum(self) -> Tensor:
        """Return the neuron with the lowest loss, by a pattern search from the lowest point of a grid.

        The search uses values only: with ReLU the loss after a step jumps where an input crosses the kink.
        """
        grid, offsets = plane(SEARCH_POINTS).reshape(-1, 2), plane(5).reshape(-1, 2) / EXTENT
        step = 2 * EXTENT / (SEARCH_POINTS - 1)
        values = self(grid)
        best, lowest = grid[values.argmin()], values.min()
        while step > PRECISION:
            candidates = best + step * offsets
            values = self(candidates)
            if values.min() < lowest:
                best, lowest = candidates[values.argmin()], values.min()
            else:
                step /= 2
        return best


def plane(points: int) -> Tensor:
    """Return a square grid of neurons, (points, points, 2), with the first coordinate along the first axis.

    >>> plane(3)[2, 0]
    tensor([ 2., -2.], dtype=torch.float64)
    """
    axis = torch.linspace(-EXTENT, EXTENT, points, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis).reshape(points, points, 2)
