"""Write a built-in model into the package, from a training run of `metabridge reproduce builtin-training`.

The image size is the one with the best 5-shot accuracy on the validation classes. The model card is kept.

    python benchmarks/package_model.py runs/runs/builtin-photos-paper-0 photos --data DATA
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from metabridge.choices import BUILTIN_MODELS, BUILTIN_MODELS_FOLDER
from metabridge.datasets import load as load_images
from metabridge.decode_options import DecodeOptions
from metabridge.learners import method, parameters
from metabridge.models import build
from metabridge.training import Model, Run, evaluate, load, save_pretrained
from metabridge.training.checkpoint import copy_into

SIZES = (64, 72, 84)  # candidates for photos; characters always have 28 pixels
TASKS = 1000


def frozen_model(run: Run, decode_options: DecodeOptions) -> Model:
    """Return the network of a run for images of this size, with the method that trains nothing."""
    recipe: dict[str, Any] = {**(run.net.recipe or {}), "size": decode_options.size}
    net = build(**recipe).eval()
    copy_into(net, run.params, dict(run.net.named_buffers()))
    net.decode_options = decode_options
    return Model(method("frozen"), net, parameters(method("frozen"), net))


def best_photo_model(run: Run, data: Path) -> Model:
    """Return the model with the image size that is best on the validation classes of mini-ImageNet."""
    scores = {}
    for size in SIZES:
        model = frozen_model(run, DecodeOptions(size, 3, crop=True))
        images = load_images("mini-imagenet", data / "mini-imagenet", decode_options=model.net.decode_options)
        scores[size] = evaluate(model, images.tasks("validation", shots=5), tasks=TASKS)
        print(f"{size} px: {scores[size]}")
    return frozen_model(run, DecodeOptions(max(scores, key=lambda size: scores[size].mean), 3, crop=True))


def main() -> None:
    """Write the model and print the size of its files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name", choices=BUILTIN_MODELS)
    parser.add_argument("--data", type=Path, required=True, help="folder that contains mini-imagenet")
    options = parser.parse_args()
    run, folder = load(options.run), BUILTIN_MODELS_FOLDER / options.name
    run = replace(run, params={name: value for name, value in run.params.items() if not name.startswith("heads.")})
    if options.name == "photos":
        model = best_photo_model(run, options.data)
    else:
        model = frozen_model(run, DecodeOptions(28, 1, crop=True, invert="auto"))
    save_pretrained(model, folder, card=(folder / "README.md").read_text(), half=True)
    size = sum(file.stat().st_size for file in BUILTIN_MODELS_FOLDER.rglob("*") if file.is_file())
    print(f"{model} is in {folder}. All built-in models take {size / 1e6:.2f} MB.")


if __name__ == "__main__":
    main()
