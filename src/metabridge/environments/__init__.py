"""Where tasks come from."""

from metabridge.environments.environment import Environment
from metabridge.environments.functions import Quadratic, Sinusoid
from metabridge.environments.images import ImageBatches, ImageTasks, LabelledImages

__all__ = ["Environment", "ImageBatches", "ImageTasks", "LabelledImages", "Quadratic", "Sinusoid"]
