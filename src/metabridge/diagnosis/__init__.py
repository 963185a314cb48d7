"""Which method pays on given tasks, found out before any training."""

from metabridge.diagnosis.diagnosis import Diagnosis, diagnose, untrained

__all__ = ["Diagnosis", "diagnose", "untrained"]
