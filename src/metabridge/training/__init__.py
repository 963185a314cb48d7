"""Loops over the learners: training and evaluation."""

from metabridge.training.augment import Augment
from metabridge.training.evaluate import Model, Predictor, Score, Views, evaluate
from metabridge.training.fit import fit, load
from metabridge.training.fitting import Fitting, Run, in_turns
from metabridge.training.loop import Point, Settings
from metabridge.training.muon import Muon
from metabridge.training.schedules import Constant, Cosine, Plateau, Schedule, Step, schedule
from metabridge.training.soft_targets import SoftTargets

__all__ = [
    "Augment",
    "Constant",
    "Cosine",
    "Fitting",
    "Model",
    "Muon",
    "Plateau",
    "Point",
    "Predictor",
    "Run",
    "Schedule",
    "Score",
    "Settings",
    "SoftTargets",
    "Step",
    "Views",
    "evaluate",
    "fit",
    "in_turns",
    "load",
    "schedule",
]
