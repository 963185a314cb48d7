"""Predict before training which method is worth its cost: pre-training, ANIL or MAML.

Pre-training means training without adaptation, which is also called non-adaptive learning (NAL).
"""

from metabridge.diagnosis.advice import Advice, KernelPrediction, MethodCost
from metabridge.diagnosis.diagnose_tasks import Diagnosis, Group, diagnose, untrained_network
from metabridge.diagnosis.estimates import Interval

__all__ = [
    "Advice",
    "Diagnosis",
    "Group",
    "Interval",
    "KernelPrediction",
    "MethodCost",
    "diagnose",
    "untrained_network",
]
