"""Image data sets, loaded by name or by path."""

from metabridge.datasets.data_check import DatasetReport, SplitReport, check_dataset
from metabridge.datasets.glyphs import load_glyphs
from metabridge.datasets.loading import DATASETS, detect, load

__all__ = ["DATASETS", "DatasetReport", "SplitReport", "check_dataset", "detect", "load", "load_glyphs"]
