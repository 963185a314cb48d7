"""Where tasks come from."""

from metabridge.environments.environment import Environment
from metabridge.environments.functions import Quadratic, Sinusoid
from metabridge.environments.images import ImageBatches, ImageTasks, LabelledImages
from metabridge.environments.mixture import Mixture

__all__ = ["Environment", "ImageBatches", "ImageTasks", "LabelledImages", "Mixture", "Quadratic", "Sinusoid"]
