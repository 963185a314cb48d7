"""Closed forms of what learners converge to and of their risks, with simulations, in the symbols of the papers."""

from metabridge.theory import adaptation, anil, finite_tasks, landscape, linear_sgd, loss_surface, power_law, teachers

__all__ = ["adaptation", "anil", "finite_tasks", "landscape", "linear_sgd", "loss_surface", "power_law", "teachers"]
