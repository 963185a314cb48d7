"""Closed forms of what learners converge to, and of their risks, in the symbols of the papers."""

from metabridge.theory import adaptation, anil, finite_tasks, landscape, teachers

__all__ = ["adaptation", "anil", "finite_tasks", "landscape", "teachers"]
