"""Networks: each a `Network` of `features` and a linear `head`."""

from metabridge.models.conv4 import conv4
from metabridge.models.mlp import mlp
from metabridge.models.network import Network, Params
from metabridge.models.norm import BatchNorm, estimate_statistics
from metabridge.models.resnet12 import DropBlock, resnet12

__all__ = ["BatchNorm", "DropBlock", "Network", "Params", "conv4", "estimate_statistics", "mlp", "resnet12"]
