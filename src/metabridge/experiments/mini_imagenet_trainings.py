"""The trainings on mini-ImageNet that A's tables 3 to 5 and its figure 2 are made of."""

from __future__ import annotations

from dataclasses import replace

from metabridge.datasets import load
from metabridge.environments.image_tasks import LabelledImages
from metabridge.errors import InputError
from metabridge.experiments.result import Work
from metabridge.experiments.training_runs import Record, recorded, trial
from metabridge.training import Views
from metabridge.training.augment import Augment
from metabridge.training.config import Plan
from metabridge.training.schedules import Cosine

SHOTS = (1, 5)
LOOKS = (
    Views(copies=5),  # B §6
    Views(mirrored=True),
    Views(mirrored=True, turned=True),
    Views(mirrored=True, cropped=True),
    Views(mirrored=True, turned=True, cropped=True),
)

_RESNET = Plan(
    "mtl",
    model="resnet12",
    model_options={"dropout": 0.1},
    statistics="running",
    augment=Augment(scale=(0.3, 1.0), growth=(60, 0.6)),
    precision="bfloat16",
    validate_tasks=500,
    validate_shots=5,
)
# Many tasks in a step cost a GPU little more than few.
_CONV = Plan(
    "maml",
    batch=16,
    queries=10,
    lr=5e-3,
    schedule=Cosine(),
    augment=False,
    precision="bfloat16",
    validate_tasks=300,
)

# Chosen on validation tasks. Where the source's schedule waits for a plateau, ours has a length that fits the time.
_RFS = replace(
    _RESNET,
    method="rfs",
    batch=256,
    iterations=40_000,
    optimizer="sgd",
    lr=0.2,
    weight_decay=5e-4,
    schedule=Cosine(warmup=0.03),
    turns=True,
    validate_every=4000,
)
PAPER: dict[str, Plan] = {
    "rfs": _RFS,
    # as many images in a step, of a quarter of the classes
    "mtl": replace(_RFS, method="mtl", training_ways=64, shots=2, queries=2, batch=1, iterations=22_000),
    "r2d2": replace(
        _RESNET, method="r2d2", shots=5, queries=10, batch=4, iterations=5000, schedule=Cosine(), validate_every=500
    ),
    "metaoptnet": replace(
        _RESNET,
        method="metaoptnet",
        shots=5,
        queries=10,
        batch=4,
        iterations=5000,
        schedule=Cosine(),
        validate_every=500,
    ),
    "maml-1": replace(_CONV, method_options={"steps": 5, "lr": 0.03}, iterations=10_000, lr=4e-3),
    "maml-5": replace(  # a support of five shots makes every inner step five times as long
        _CONV,
        method_options={"steps": 3, "lr": {"features": 0.02, "head": 0.15}},
        iterations=11_000,
        queries=8,
        shots=5,
        validate_shots=5,
    ),
    "anil-1": replace(_CONV, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=12_000),
    "anil-5": replace(
        _CONV, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=12_000, shots=5, validate_shots=5
    ),
}


def plans(scale: str) -> dict[str, Plan]:
    """Return the trainings of a scale by name; a name that ends in -1 or -5 is trained for that many shots."""
    if scale == "paper":
        return PAPER
    small: dict[str, Plan] = {}
    for name, plan in PAPER.items():
        plan = replace(plan, iterations=30, batch=min(plan.batch, 32), validate_tasks=20, validate_every=10)
        plan = replace(plan, augment=None, turns=False, precision="float32")
        if plan.model == "resnet12":
            plan = replace(plan, model_options={**plan.model_options, "widths": [8, 16, 32, 64]})
        else:
            plan = replace(plan, batch=2, queries=5)
        small[name] = plan
    return small


def records(work: Work, names: tuple[str, ...]) -> dict[str, Record]:
    """Return the records of these trainings, as far as there is time for them."""
    chosen = {name: plan for name, plan in plans(work.scale).items() if name in names}
    work.check_only(chosen)
    found: dict[str, Record] = {}
    images: LabelledImages | None = None
    for name, plan in chosen.items():
        plan, label = replace(plan, seed=work.seed), f"{data_name(work)}-{name}-{work.scale}-{work.seed}"
        record = recorded(work, label, plan)
        if record is None and (not work.only or name in work.only):
            images = images or images_of(work)
            own = name.partition("-")[2]
            shots = (int(own),) if own else SHOTS
            tasks, looks = (2000, LOOKS) if work.scale == "paper" else (40, LOOKS[:2])
            record = trial(work, label, plan, images, shots=shots, tasks=tasks, looks=looks)
        if record is not None:
            found[name] = record
    return found


def data_name(work: Work) -> str:
    """Return the data set to use: mini-ImageNet, or at the quick scale glyphs where it is not at hand."""
    here = work.data is not None and (work.data / "mini-imagenet").exists()
    return "mini-imagenet" if here or work.scale == "paper" else "glyphs"


def images_of(work: Work) -> LabelledImages:
    """Return the images to train on."""
    if data_name(work) == "glyphs":
        return load("glyphs")
    return mini_imagenet(work, 84 if work.scale == "paper" else 32)


def mini_imagenet(work: Work, size: int) -> LabelledImages:
    """Return mini-ImageNet at so many pixels."""
    if work.data is None or not (work.data / "mini-imagenet").exists():
        raise InputError(
            "the paper scale needs mini-ImageNet, in the folder mini-imagenet of the one that --data names "
            f"(now {work.data}). Use --scale quick to try the experiment without it."
        )
    return load("mini-imagenet", work.data / "mini-imagenet", size=size)
