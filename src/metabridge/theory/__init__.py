"""Closed forms for the solutions and risks of learners, with simulations, in the notation of the papers they cite."""

from metabridge.theory import (
    adaptation,
    anil,
    finite_tasks,
    landscape,
    linear_problems,
    linear_sgd,
    loss_surface,
    power_law,
    sampled_minima,
    teachers,
)

__all__ = [
    "adaptation",
    "anil",
    "finite_tasks",
    "landscape",
    "linear_problems",
    "linear_sgd",
    "loss_surface",
    "power_law",
    "sampled_minima",
    "teachers",
]
