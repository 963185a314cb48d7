"""Loops over the learners: training and evaluation."""

from metabridge.training.evaluate import Model, Score, evaluate
from metabridge.training.fit import Point, Run, fit

__all__ = ["Model", "Point", "Run", "Score", "evaluate", "fit"]
