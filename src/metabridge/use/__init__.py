"""Trained models put to use: a classifier with scikit-learn's habits, and ONNX files for other programs."""

from metabridge.use.classifier import FewShotClassifier
from metabridge.use.onnx_export import export_onnx, write_head

__all__ = ["FewShotClassifier", "export_onnx", "write_head"]
