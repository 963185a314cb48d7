"""Loops over the learners: training and evaluation."""

from metabridge.training.augment import Augment
from metabridge.training.evaluate import Model, Predictor, Score, Views, evaluate
from metabridge.training.fit import fit, load
from metabridge.training.fitting import Fitting, Run, in_turns
from metabridge.training.loop import Point, Settings
from metabridge.training.schedule import Constant, Cosine, Plateau, Schedule, Step, schedule

__all__ = [
    "Augment",
    "Constant",
    "Cosine",
    "Fitting",
    "Model",
    "Plateau",
    "Point",
    "Predictor",
    "Run",
    "Schedule",
    "Score",
    "Settings",
    "Step",
    "Views",
    "evaluate",
    "fit",
    "in_turns",
    "load",
    "schedule",
]
