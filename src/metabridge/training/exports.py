"""The public names of `metabridge.training`; imported on first use, since they need PyTorch."""

from metabridge.training.augment import Augment
from metabridge.training.config import ImageTrainingConfig, SoftTargets, TrainingConfig
from metabridge.training.evaluation import Model, Predictor, Score, TestTimeAugmentation, evaluate
from metabridge.training.fitting import fit, load
from metabridge.training.image_training import train_on_images
from metabridge.training.interleaved import train_interleaved
from metabridge.training.learning_curve import Point
from metabridge.training.model_folder import from_pretrained, save_pretrained
from metabridge.training.model_loading import load_model
from metabridge.training.muon import Muon
from metabridge.training.trainer import Run, Trainer

__all__ = [
    "Augment",
    "ImageTrainingConfig",
    "Model",
    "Muon",
    "Point",
    "Predictor",
    "Run",
    "Score",
    "SoftTargets",
    "TestTimeAugmentation",
    "Trainer",
    "TrainingConfig",
    "evaluate",
    "fit",
    "from_pretrained",
    "load",
    "load_model",
    "save_pretrained",
    "train_interleaved",
    "train_on_images",
]
