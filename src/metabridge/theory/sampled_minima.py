"""Minima of the losses of non-adaptive learning (NAL) and MAML for students with a single neuron.

The losses are those on sampled episodes and on the population.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.theory.loss_surface import LossSurface, neuron_grid
from metabridge.theory.teachers import TeacherTask, lowest_stationary_point, maml_loss, nal_loss, sample_episodes

TEST_QUERIES = 100  # query examples per test episode; the risks of the minima are measured on test episodes


@dataclass(frozen=True, eq=False)
class SampledMinima:
    """The minima of the losses of NAL and MAML for several draws of episodes of the same tasks.

    The dictionaries have the keys "NAL" and "MAML".

    Args:
        tasks: The tasks. Their teachers have the same activation, and a single neuron with two weights each.
        alpha: Step size α of adaptation.
        positions: The neuron at the minimum for each draw, (draws, 2).
        risks: The loss of this neuron on new episodes after one adaptation step, for each draw.
        surfaces: The losses of the first draw on a square grid of neurons.

    Example:
        >>> task = TeacherTask(torch.tensor([[1.0, 0.5]], dtype=torch.float64), "tanh")
        >>> minima = SampledMinima.find(
        ...     [task], 0.5, shots=5, queries=5, episodes=2, test_episodes=2, draws=2, grid_size=3, seed=0
        ... )
        >>> minima.positions["NAL"].shape, minima.surfaces["MAML"].shape
        (torch.Size([2, 2]), torch.Size([3, 3]))
    """

    tasks: Sequence[TeacherTask]
    alpha: float
    positions: Mapping[str, Tensor]
    risks: Mapping[str, list[float]]
    surfaces: Mapping[str, Tensor]

    @classmethod
    def find(
        cls,
        tasks: Sequence[TeacherTask],
        alpha: float,
        *,
        shots: int,
        queries: int,
        episodes: int,
        test_episodes: int,
        draws: int,
        grid_size: int,
        seed: int,
    ) -> SampledMinima:
        """Find the minima of both losses for each draw of episodes.

        Args:
            tasks: The tasks.
            alpha: Step size α of adaptation.
            shots: Number of support examples of an episode.
            queries: Number of query examples of an episode.
            episodes: Number of episodes of each task.
            test_episodes: Number of new episodes of each task on which the risks are measured.
            draws: Number of independent draws of all episodes.
            grid_size: Number of grid points per axis of the loss surfaces.
            seed: Seed of the episodes.

        Returns:
            The minima.
        """
        generator = torch.Generator().manual_seed(seed)
        activation = tasks[0].activation
        positions: dict[str, list[Tensor]] = {"NAL": [], "MAML": []}
        risks: dict[str, list[float]] = {"NAL": [], "MAML": []}
        surfaces: dict[str, Tensor] = {}
        for _ in range(draws):
            train_set = sample_episodes(tasks, episodes, shots, queries, generator)
            test_set = sample_episodes(tasks, test_episodes, shots, TEST_QUERIES, generator)
            risk = LossSurface(activation, test_set, alpha)
            for method, inner_lr in (("NAL", None), ("MAML", alpha)):
                loss = LossSurface(activation, train_set, inner_lr)
                if method not in surfaces:
                    surfaces[method] = loss(neuron_grid(grid_size))
                positions[method].append(loss.minimum())
                risks[method].append(float(risk(positions[method][-1])))
        return cls(tasks, alpha, {method: torch.stack(points) for method, points in positions.items()}, risks, surfaces)

    def distances(self, method: str, neurons: Sequence[Sequence[float]]) -> list[float]:
        """Return the mean distance between the minimum and some neurons, for each draw.

        Args:
            method: "NAL" or "MAML".
            neurons: The neurons.

        Returns:
            The distances.
        """
        return torch.cdist(self.positions[method], torch.tensor(neurons, dtype=torch.float64)).mean(1).tolist()

    def population_minima(self) -> dict[str, Tensor] | None:
        """Return the minimum of each method's population loss, by searches that start at the sampled minima.

        Returns:
            The neuron (2) at the minimum of each method; None if a sampled minimum has a lower loss than all stationary
            points.
        """
        losses = {"NAL": nal_loss(self.tasks), "MAML": maml_loss(self.tasks, self.alpha)}
        minima = {}
        for method, loss in losses.items():
            point = lowest_stationary_point(loss, self.positions[method][:, None])
            if point is None:
                return None
            minima[method] = point.squeeze(0)
        return minima
