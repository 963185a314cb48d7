"""Where tasks come from."""

from metabridge.environments.environment import Environment
from metabridge.environments.functions import Quadratic, Sinusoid
from metabridge.environments.images import ImageTasks, LabelledImages

__all__ = ["Environment", "ImageTasks", "LabelledImages", "Quadratic", "Sinusoid"]
