"""Which method pays on given tasks, found out before any training."""

from metabridge.diagnosis.diagnose_tasks import Diagnosis, diagnose, untrained

__all__ = ["Diagnosis", "diagnose", "untrained"]
