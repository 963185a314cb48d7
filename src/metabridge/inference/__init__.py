"""Inference with trained models: a scikit-learn classifier for new classes, and ONNX export."""

from metabridge.inference.classifier import FewShotClassifier
from metabridge.inference.onnx_export import export_onnx, write_head

__all__ = ["FewShotClassifier", "export_onnx", "write_head"]
