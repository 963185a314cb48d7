"""`DecodeOptions`: how an image file becomes the input of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from metabridge.errors import InputError

MAX_SIDE = 7071  # pixels; a square of this size has 50 million pixels, the most that are decoded
Interpolation = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]


@dataclass(frozen=True, repr=False)
class DecodeOptions:
    """Options for decoding images.

    Args:
        size: Width and height of the result in pixels.
        channels: Number of channels: 1 (gray) or 3 (RGB).
        crop: Whether to keep the proportions of each image and to cut off its edges. If false, the whole image is
            resized to a square, even if this changes its proportions.
        invert: Whether to replace each value v by 255 - v, so that black strokes on white become 255 on 0. "auto":
            invert only the images whose border is light.
        resize: Length in pixels to which the shorter side is resized (without `crop`, both sides) before the central
            square of `size` pixels is cut out. Default: `size`.
        interpolation: Filter of Pillow for resizing.
        round_crop: Whether to round the position of the central square to the nearest pixel, and halves to even
            numbers, as torchvision does. If false, it is rounded down, as in transformers.

    >>> DecodeOptions(size=224, channels=3, crop=True, resize=256, interpolation="bicubic").resize
    256
    """

    size: int
    channels: int
    crop: bool = False
    invert: bool | Literal["auto"] = False
    resize: int | None = None
    interpolation: Interpolation = "lanczos"
    round_crop: bool = False

    def __post_init__(self) -> None:
        for name in ("size", "resize"):
            value = getattr(self, name)
            if not (isinstance(value, int) and 0 < value <= MAX_SIDE) and not (name == "resize" and value is None):
                raise InputError(f"{name} is {value!r}, but must be from 1 to {MAX_SIDE} pixels. Use a smaller size.")
        if self.resize is not None and self.resize < self.size:
            raise InputError(f"resize is {self.resize}, but must be at least size, which is {self.size}.")
        if self.channels not in (1, 3):
            raise InputError(f"channels is {self.channels}, but images have 1 (gray) or 3 (RGB). Use one of these.")
        if self.invert not in (True, False, "auto") or self.interpolation not in get_args(Interpolation):
            raise InputError(f"invert is {self.invert!r} and interpolation {self.interpolation!r}, which do not exist.")

    def __repr__(self) -> str:
        return f"DecodeOptions({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"

    def to_json(self) -> dict[str, object]:
        """Return the options by name, without those that have their defaults and were added after version 0.2.0.

        The names of cache files and the metadata of saved classifiers contain these options.

        >>> DecodeOptions(size=28, channels=1, invert=True).to_json()
        {'size': 28, 'channels': 1, 'crop': False, 'invert': True}
        """
        defaults = {field.name: field.default for field in fields(self)}
        names = ("size", "channels", "crop", "invert")
        return {name: value for name, value in asdict(self).items() if name in names or value != defaults[name]}


def as_decode_options(options: DecodeOptions | Mapping[str, Any]) -> DecodeOptions:
    """Return options that may be a dictionary, such as the one that `to_json` returns.

    Raises:
        InputError: If an option does not exist or is out of range.

    >>> as_decode_options({"size": 8, "channels": 1}).size
    8
    """
    if isinstance(options, DecodeOptions):
        return options
    try:
        return DecodeOptions(**options)
    except TypeError as error:
        raise InputError(f"decode_options is {options!r}, which cannot be used ({error}).") from error
