"""Write the runs and adapted models of this folder. Version 0.1.0 wrote them; later versions must read them.

PYTHONPATH=SOURCE_OF_0.1.0/src python tests/data/v0.1.0/write_files.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from metabridge.use import FewShotClassifier

from metabridge import evaluate, fit, load, method
from metabridge.environments import LabelledImages, Sinusoid
from metabridge.heads import SVM
from metabridge.models import conv4, mlp
from metabridge.training import Augment, Plateau, SoftTargets, Step

HERE = Path(__file__).parent


def images(size: int, channels: int) -> LabelledImages:
    """Twelve classes of ten images: stripes whose direction and width depend on the class, with noise."""
    y, x = np.mgrid[:size, :size] / size
    noise = np.random.RandomState(0)
    pixels = []
    for label in range(12):
        angle, width = np.pi * label / 12, 2 + label % 3
        for _ in range(10):
            wave = np.sin(2 * np.pi * width * (x * np.cos(angle) + y * np.sin(angle)) + noise.uniform(0, 1))
            shades = np.array([120, 90, 60])[:channels, None, None]
            pixels.append(128 + shades * wave + noise.normal(0, 10, (channels, size, size)))
    labels = torch.arange(12).repeat_interleave(10)
    splits = {"train": torch.arange(6), "validation": torch.arange(6, 9), "test": torch.arange(9, 12)}
    values = torch.from_numpy(np.stack(pixels).clip(0, 255).astype(np.uint8))
    return LabelledImages(values, labels, tuple("abcdefghijkl"), torch.zeros(12, dtype=torch.int64), ("all",), splits)


GREY, COLOUR = images(16, 1), images(18, 3)


def train_tasks(data: LabelledImages):
    return data.tasks("train", ways=3, shots=2, queries=3)


def sinusoids():
    return {"environment": Sinusoid(), "validate": Sinusoid()}


ON_GREY = {"environment": train_tasks(GREY), "validate": GREY.tasks("validation", ways=3, shots=1, queries=4)}
ON_COLOUR = {"environment": train_tasks(COLOUR), "validate": COLOUR.tasks("validation", ways=3, shots=1, queries=4)}
SHORT = {"iterations": 6, "validate_every": 2, "validate_tasks": 4, "tasks": 2, "progress": False}

RUNS = {
    "maml-rates": lambda: dict(
        net=mlp(1, 1, width=6), method=method("maml", steps=2, rates="per-tensor"), **sinusoids(), **SHORT, average=0.9
    ),
    "mtl": lambda: dict(
        net=conv4(3, 18, 3, filters=4, statistics="running"),
        method=method("mtl"),
        **ON_COLOUR,
        **SHORT,
        optimizer="radam",
        schedule=Plateau(patience=0),
        augment=Augment(padding=2),
        patience=5,
    ),
    "rfs": lambda: dict(
        net=conv4(3, 18, 3, filters=4, statistics="running"),
        method=method("rfs"),
        **ON_COLOUR | {"environment": COLOUR.batches("train", size=16)},
        **SHORT | {"tasks": 1},
        optimizer="sgd",
        lr=0.05,
        weight_decay=5e-4,
        schedule=Step(),
        soft_targets=SoftTargets(smoothing=0.1),
    ),
    "metaoptnet": lambda: dict(
        net=conv4(1, 16, 3, filters=4, statistics="running"), method=method("metaoptnet"), **ON_GREY, **SHORT
    ),
    "r2d2": lambda: dict(
        net=conv4(1, 16, 3, filters=4, statistics="running"), method=method("r2d2"), **ON_GREY, **SHORT
    ),
    "anil-frozen": lambda: dict(
        net=mlp(256, 3, width=5), method=method("anil-frozen"), **ON_GREY, **SHORT, optimizer="adamw"
    ),
}
HALFWAY = ("maml-rates", "mtl")  # also kept as they were after three iterations
FINISHED_ONLY = ("metaoptnet", "r2d2")  # whose training state is left out, to keep the folder small
ADAPTED = {  # folder of the adapted model: run and head
    "adapted-anil": ("anil-frozen", None),
    "adapted-metaoptnet": ("metaoptnet", None),
    "adapted-logistic": ("mtl", "logistic"),
    "adapted-svm": ("rfs", "svm"),
    "adapted-ridge": ("r2d2", "ridge"),
    "adapted-centroid": ("rfs", "centroid"),
    "adapted-hinge": ("mtl", SVM(1.0, "hinge")),
}


def test_environment(name: str):
    if name == "maml-rates":
        return Sinusoid()
    return (COLOUR if name in ("mtl", "rfs") else GREY).tasks("test", ways=3, shots=2, queries=5)


def support(name: str) -> tuple[np.ndarray, list[str]]:
    data = COLOUR if name in ("mtl", "rfs") else GREY
    rows = [10 * label + index for label in (9, 10, 11) for index in range(3)]
    pixels = np.moveaxis(data.images[rows].numpy(), 1, -1)
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels, [data.class_names[data.labels[row]] for row in rows]


def main() -> None:
    expected = {}
    for name, options in RUNS.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        run = fit(**options(), out=folder)
        score = evaluate(load(folder), test_environment(name), tasks=20)
        expected[name] = {
            "validation": run.best.mean,
            "iteration": run.curve[-1].iteration,
            "test": score.mean,
            "ci95": score.ci95,
        }
        longer = HERE / "longer"
        shutil.copytree(folder, longer)
        run = fit(**options() | {"iterations": 8}, out=longer)
        expected[name]["after 8 iterations"] = float(sum(p.abs().sum() for p in run.params.values()))
        shutil.rmtree(longer)
        if name in HALFWAY:
            half = HERE / f"{name}-halfway"
            shutil.rmtree(half, ignore_errors=True)
            fit_options = options()
            kind, count, sample = type(fit_options["environment"]), [0], type(fit_options["environment"]).sample
            stop = 4 if name == "maml-rates" else 12  # statistics are measured on eight more batches

            def stopping(self, tasks, generator, fit_options=fit_options, count=count, sample=sample, stop=stop):
                count[0] += self is fit_options["environment"]
                if self is fit_options["environment"] and count[0] == stop:
                    raise KeyboardInterrupt
                return sample(self, tasks, generator)

            with mock.patch.object(kind, "sample", stopping):
                try:
                    fit(**fit_options, out=half)
                except KeyboardInterrupt:
                    pass
                else:
                    raise AssertionError("was not stopped")
        if name in FINISHED_ONLY:
            (folder / "state.safetensors").unlink()
    for name, (trained, head) in ADAPTED.items():
        pixels, labels = support(trained)
        shutil.rmtree(HERE / name, ignore_errors=True)
        run = load(HERE / trained)
        if isinstance(head, SVM):
            run, head = replace(run, method=replace(run.method, test=head)), None
        classifier = FewShotClassifier(run, head=head).fit(pixels, labels)
        classifier.save(HERE / name)
        expected[name] = {"probabilities": classifier.predict_proba(pixels[::2]).tolist()}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
