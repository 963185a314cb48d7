"""Closed forms of what learners converge to and of their risks, with simulations, in the symbols of the papers."""

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
