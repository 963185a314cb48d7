"""Closed forms: what learners converge to, and how well that does, in the papers' own symbols."""

from metabridge.theory import adaptation, anil, finite_tasks, landscape, teachers

__all__ = ["adaptation", "anil", "finite_tasks", "landscape", "teachers"]
