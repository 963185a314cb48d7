"""Loops over the learners: training and evaluation."""

from metabridge.training.augment import Augment
from metabridge.training.evaluate import Model, Predictor, Score, Views, evaluate
from metabridge.training.fit import Run, fit, load
from metabridge.training.loop import Point
from metabridge.training.schedule import Constant, Cosine, Plateau, Schedule, Step, schedule

__all__ = [
    "Augment",
    "Constant",
    "Cosine",
    "Model",
    "Plateau",
    "Point",
    "Predictor",
    "Run",
    "Schedule",
    "Score",
    "Step",
    "Views",
    "evaluate",
    "fit",
    "load",
    "schedule",
]
