from dataclasses import replace

import numpy as np
import pytest
import torch

from metabridge.environments import Environment, LabeledImages, Mixture
from metabridge.errors import InputError

COUNTS = [5, 9, 6, 30, 5, 7, 8, 5, 6, 12, 5, 5, 9]  # number of images of each class
SUPERCLASSES = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 0]  # superclass of each class
# classes of each split
SPLITS = {"train": [11, 3, 0, 1, 2, 4, 5, 6, 7, 8], "test": [9, 10, 12]}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def data() -> LabeledImages:
    """Return classes of different sizes in mixed order; the two pixels of an image are its class and its index."""
    labels = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    labels = labels[torch.randperm(len(labels), generator=seeded())]
    images = torch.stack([labels, torch.arange(len(labels))], dim=-1).to(torch.uint8)
    return LabeledImages(
        images=images[:, None, None, :],
        labels=labels,
        class_names=tuple(f"class{index}" for index in range(len(COUNTS))),
        superclasses=torch.tensor(SUPERCLASSES),
        superclass_names=("a", "b", "c", "d"),
        splits={name: torch.tensor(members) for name, members in SPLITS.items()},
    )


def pixels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the class and the index of each image, from images of shape (tasks, images, 1, 1, 2)."""
    values = (x * 255).round().long().flatten(2)
    return values[..., 0], values[..., 1]


def test_no_image_occurs_twice_in_a_task(data):
    tasks = data.tasks("train", ways=4, shots=2, queries=3).sample(300, seeded())
    _, image_indices = pixels(tasks.without_split().support_x)
    assert (image_indices.sort(dim=1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("superclass", ["any", "same", "different"])
def test_every_image_has_the_class_of_its_label(data, superclass):
    environment = data.tasks("train", ways=3, shots=2, queries=3, superclass=superclass)
    tasks = environment.sample(200, seeded())
    task_classes = torch.tensor(SPLITS["train"])[tasks.classes]
    for x, y in [(tasks.support_x, tasks.support_y), (tasks.query_x, tasks.query_y)]:
        assert torch.equal(pixels(x)[0], task_classes.gather(1, y))


def test_images_are_ordered_by_class(data):
    tasks = data.tasks("train", ways=3, shots=1, queries=2).sample(2, seeded())
    assert tasks.support_y.tolist() == 2 * [[0, 1, 2]]
    assert tasks.query_y.tolist() == 2 * [[0, 0, 1, 1, 2, 2]]


def test_the_ways_of_a_task_are_different_classes_of_the_split(data):
    environment = data.tasks("test", ways=3, shots=1, queries=1)
    tasks = environment.sample(100, seeded())
    assert tasks.classes is not None
    assert torch.equal(tasks.classes.sort(dim=1).values, torch.arange(3).expand(100, 3))
    assert environment.class_names == ("class9", "class10", "class12")
    assert environment.classes == environment.outputs == 3


def test_every_class_is_equally_likely_at_every_way(data):
    tasks = data.tasks("train", ways=4, shots=1, queries=1).sample(20_000, seeded())
    assert tasks.classes is not None
    for way in range(4):
        frequencies = torch.bincount(tasks.classes[:, way], minlength=10) / 20_000
        assert (frequencies - 0.1).abs().max() < 5 * (0.1 * 0.9 / 20_000) ** 0.5  # five standard errors


def test_every_image_of_a_class_is_equally_likely(data):
    tasks = data.tasks("train", ways=1, shots=1, queries=4).sample(20_000, seeded())
    _, image_indices = pixels(tasks.support_x)
    frequencies = torch.bincount(image_indices.flatten(), minlength=len(data.labels)) / 20_000
    # 1/10 is the probability of a class
    expected = torch.tensor([0.1 / COUNTS[label] if label in SPLITS["train"] else 0.0 for label in data.labels])
    # five standard errors of the most likely images, whose probability is 0.02
    assert (frequencies - expected).abs().max() < 5 * (0.02 / 20_000) ** 0.5
    assert (frequencies[expected == 0] == 0).all()
    assert (frequencies[expected > 0] > 0).all()


def test_same_superclass_tasks_use_the_superclasses_with_enough_classes(data):
    environment = data.tasks("train", ways=3, shots=1, queries=1, superclass="same")
    tasks = environment.sample(4000, seeded())
    superclasses = data.superclasses[data.splits["train"]][tasks.classes]
    assert (superclasses == superclasses[:, :1]).all()
    # In train, superclasses 0 and 1 have 3 and 4 classes; 2 and 3 have fewer than 3.
    frequencies = torch.bincount(superclasses[:, 0], minlength=4) / 4000
    # five standard errors: 5 · √(0.5 · 0.5/4000) ≈ 0.04
    assert frequencies.tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0.04)


def test_different_superclass_tasks_never_repeat_a_superclass(data):
    environment = data.tasks("train", ways=3, shots=1, queries=1, superclass="different")
    tasks = environment.sample(4000, seeded())
    superclasses = data.superclasses[data.splits["train"]][tasks.classes].sort(dim=1).values
    assert (superclasses.diff(dim=1) > 0).all()
    assert len(tasks.classes.unique()) == 10  # every class of the split occurs


def test_the_same_seed_gives_the_same_tasks_and_another_seed_gives_different_tasks(data):
    environment: Environment = data.tasks("train", ways=3, shots=1, queries=2)
    tasks, same_seed, other_seed = (environment.sample(30, seeded(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one, two) for one, two in zip(tasks.tensors(), same_seed.tensors()))
    assert not torch.equal(tasks.support_x, other_seed.support_x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_seed_gives_the_same_tasks_on_every_device(data):
    settings = {"ways": 3, "shots": 1, "queries": 2}
    cpu_tasks = data.tasks("train", **settings).sample(30, seeded())
    gpu_tasks = data.to("cuda").tasks("train", **settings).sample(30, seeded())
    assert gpu_tasks.device.type == "cuda"
    assert all(torch.allclose(one, two.cpu()) for one, two in zip(cpu_tasks.tensors(), gpu_tasks.tensors()))


def test_moving_the_images_keeps_labels_and_splits_on_the_cpu(data):
    moved = data.to("meta")
    assert moved.images.device.type == "meta"
    assert {moved.labels.device.type, moved.superclasses.device.type, moved.splits["test"].device.type} == {"cpu"}
    assert moved.tasks("train", ways=3, shots=1, queries=2).sample(2, seeded()).support_x.device.type == "meta"


def test_images_are_floats_from_zero_to_one(data):
    white = replace(data, images=torch.full_like(data.images, 255))
    x = white.tasks("train", shots=1, queries=2).sample(1, seeded()).support_x
    assert x.dtype == torch.float32
    assert (x == 1).all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"split": "dev"}, "split is 'dev', but must be one of 'train', 'test'."),
        ({"ways": 11}, "ways is 11, but split 'train' has 10 classes. Use ways=10 or fewer."),
        ({"ways": 0}, "ways is 0, but must be an integer of at least 1. Use ways=1 or more."),
        ({"superclass": "near"}, "superclass is 'near', but must be one of 'any', 'same', 'different'."),
        (
            {"ways": 5, "superclass": "same"},
            "superclass is 'same' with ways=5, but the largest superclass of split 'train' has 4 classes. "
            "Use ways=4 or fewer, or superclass='any'.",
        ),
        (
            {"ways": 5, "superclass": "different"},
            "superclass is 'different' with ways=5, but split 'train' has 4 superclasses. "
            "Use ways=4 or fewer, or superclass='any'.",
        ),
        (
            {"shots": 1, "queries": 15},
            "class 'class11' has 5 images, but 1 shot + 15 queries need 16. Use queries=4 or fewer.",
        ),
        (
            {"shots": 5, "queries": 1},
            "class 'class11' has 5 images, but 5 shots + 1 query need 6. "
            "Use shots=1 and queries=4 or fewer, or omit classes with fewer than 6 images (min_images=6, on the "
            "command line --min-images 6).",
        ),
    ],
)
def test_impossible_tasks_are_rejected(data, settings, sentence):
    arguments = {"split": "train", "ways": 2, "shots": 1, "queries": 1} | settings
    with pytest.raises(InputError) as caught:
        data.tasks(arguments.pop("split"), **arguments)
    assert str(caught.value) == sentence


def test_tasks_of_a_split_with_a_single_class_raise_an_error(data):
    single_class = replace(data, splits={"train": data.splits["train"][:1]})
    with pytest.raises(InputError, match=r"ways is 2, but split 'train' has 1 class\. Add classes\."):
        single_class.tasks("train", ways=2, shots=1, queries=1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"images": torch.zeros(3, 1, 2, 2)}, "images is float32 of shape (3, 1, 2, 2), but must be uint8"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels is int64 of shape (3,), but must be int64 of shape ("),
        ({"class_names": ("only",)}, "labels has indices from 0 to 12, but there are 1 names."),
        ({"superclass_names": ("a", "b", "c")}, "superclasses has indices from 0 to 3, but there are 3 names"),
        ({"splits": {"a": torch.tensor([13])}}, "splits['a'] has indices from 13 to 13, but there are 13 names"),
        ({"splits": {"a": torch.tensor([], dtype=torch.int64)}}, "split 'a' has no classes."),
        (
            {"splits": {"a": torch.tensor([1, 2]), "b": torch.tensor([2])}},
            "class 'class2' is in the splits 'a' and 'b'. List every class once, in one split.",
        ),
    ],
)
def test_inconsistent_fields_are_rejected(data, fields, sentence):
    with pytest.raises(InputError) as caught:
        replace(data, **fields)
    assert str(caught.value).startswith(sentence)


def test_batches_sample_the_images_of_the_split_uniformly(data):
    batches = data.batches("train", size=50)
    episodes = batches.sample(400, seeded())
    classes, image_indices = pixels(episodes.support_x)
    assert torch.equal(classes, torch.tensor(SPLITS["train"])[episodes.support_y])
    assert torch.equal(episodes.classes, torch.arange(10).expand(400, 10))
    assert not episodes.is_split
    counts = torch.bincount(image_indices.flatten(), minlength=len(data.labels))
    in_split = torch.isin(data.labels, torch.tensor(SPLITS["train"]))
    assert (counts[~in_split] == 0).all()
    expected = 400 * 50 / int(in_split.sum())
    assert (counts[in_split] - expected).abs().max() < 5 * expected**0.5  # about five standard deviations
    assert batches.outputs == batches.classes == 10


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": 0}, "size is 0, but must be an integer of at least 1. Use size=1 or more."),
        ({"split": "dev"}, "split is 'dev', but must be one of 'train', 'test'."),
    ],
)
def test_impossible_batches_are_rejected(data, settings, sentence):
    with pytest.raises(InputError) as caught:
        data.batches(settings.pop("split", "train"), **settings)
    assert str(caught.value) == sentence


@pytest.fixture
def square_images() -> LabeledImages:
    """Return images of 3 × 3 pixels without symmetry, of five classes in mixed order; one class is in no split."""
    labels = torch.tensor([2, 0, 1, 1, 3, 0, 2, 4, 3, 4])
    images = torch.randint(256, (10, 2, 3, 3), generator=seeded()).to(torch.uint8)
    return LabeledImages(
        images,
        labels,
        ("ant", "bee", "cat", "dog", "elk"),
        torch.tensor([0, 0, 1, 1, 1]),
        ("insects", "mammals"),
        {"train": torch.tensor([3, 1]), "validation": torch.tensor([2]), "test": torch.tensor([0])},
    )


@pytest.mark.parametrize("splits", [("train",), ("train", "test"), None])
def test_rotations_add_three_classes_for_each_class_of_the_splits(square_images, splits):
    rotated = square_images.with_rotations(splits)
    rotated_splits = set(square_images.splits if splits is None else splits)
    for split, members in square_images.splits.items():
        old = {square_images.class_names[member] for member in members.tolist()}
        new = {rotated.class_names[member] for member in rotated.splits[split].tolist()}
        angles = ("/turned90", "/turned180", "/turned270") if split in rotated_splits else ()
        assert new == old | {name + angle for name in old for angle in angles}
    assert rotated.class_names[:5] == square_images.class_names
    assert torch.equal(rotated.images[:10], square_images.images)
    assert torch.equal(rotated.labels[:10], square_images.labels)
    for image_index in range(10, len(rotated.images)):
        name, _, angle = rotated.class_names[rotated.labels[image_index]].partition("/turned")
        sources = square_images.images[square_images.labels == square_images.class_names.index(name)].numpy()
        candidates = [np.rot90(source, int(angle) // 90, (1, 2)) for source in sources]
        assert sum(np.array_equal(rotated.images[image_index], candidate) for candidate in candidates) == 1
    for label, name in enumerate(rotated.class_names):
        original_class = square_images.class_names.index(name.partition("/")[0])
        assert rotated.superclasses[label] == square_images.superclasses[original_class]
    counts = rotated.labels.bincount(minlength=len(rotated.class_names))
    assert (counts == 2).all()  # each original class has two images


def test_rotating_unknown_splits_or_images_that_are_not_square_raises_an_error(square_images, data):
    with pytest.raises(
        InputError, match="splits is 'trian', but the splits of these images are 'train', 'validation', 'test'"
    ):
        square_images.with_rotations(("trian",))
    with pytest.raises(InputError, match="images are 1×2 pixels, but only square images can be rotated by 90"):
        data.with_rotations()


def test_episodes_from_sampled_indices_equal_the_sampled_episodes(data):
    environment = data.tasks("train", ways=3, shots=2, queries=2)
    images = data.images.float() / 255
    indices = environment.sample_indices(20, seeded())
    episodes = indices.to_episodes(lambda image_indices: images[image_indices])
    expected = environment.sample(20, seeded())
    assert len(episodes.tensors()) == 5
    assert all(torch.equal(one, two) for one, two in zip(episodes.tensors(), expected.tensors()))
    features = torch.randn(len(data.labels), 7, generator=seeded())
    with_features = indices.to_episodes(lambda image_indices: features[image_indices])
    assert torch.equal(with_features.query_x, features[pixels(expected.query_x)[1]])


def test_image_indices_are_those_of_the_images_in_the_split(data):
    image_indices = data.tasks("test", ways=2, shots=1, queries=1).image_indices
    expected = torch.isin(data.labels, torch.tensor(SPLITS["test"])).nonzero().squeeze(1)
    assert torch.equal(image_indices.sort().values, expected)


def test_float_images_have_the_shape_of_the_indices(data):
    image_indices = torch.tensor([[4, 0, 7], [2, 2, 1]])
    images = data.float_images(image_indices)
    assert images.shape == (2, 3, 1, 1, 2)
    assert images.dtype == torch.float32
    assert torch.equal(images, data.images[image_indices].float() / 255)


def test_repr_is_one_short_line(data):
    tasks = data.tasks("train", ways=2, shots=1, queries=1, superclass="same")
    assert repr(data) == "LabeledImages(112 images of 1×1×2, 10 train / 3 test classes)"
    assert repr(tasks) == "ImageTasks('train', 2-way 1-shot, 1 query per class, 10 classes, superclass='same')"
    assert repr(data.batches("test", size=50)) == "ImageBatches('test', 50 images per batch, 3 classes)"
    named = replace(data, load_arguments={"name": "folder", "root": "photographs"})
    assert repr(named).startswith("LabeledImages('folder', 112 images of")
    assert repr(named.tasks("test", ways=2, queries=1)).startswith("ImageTasks('folder', 'test', 2-way 1-shot,")
    assert repr(replace(data, splits={})) == "LabeledImages(112 images of 1×1×2, no classes)"
    assert len(repr(Mixture((tasks, tasks), (0.5, 0.5)))) < 300


def test_downscaled_images_have_the_means_of_the_pixels_that_they_replace(glyphs):
    small = glyphs.downscaled(7)
    expected = glyphs.images[:50].double().unflatten(3, (7, 4)).unflatten(2, (7, 4)).mean((3, 5))
    assert (small.images[:50] - expected).abs().max() <= 0.5
    assert len(small.images) == len(glyphs.images)
    with pytest.raises(InputError, match="size is 29, but must be from 1 to 28"):
        glyphs.downscaled(29)


def test_notebooks_show_a_table_of_the_splits(data):
    html = replace(data, load_arguments={"name": "<folder>"})._repr_html_()
    train, test = (sum(COUNTS[member] for member in SPLITS[split]) for split in ("train", "test"))
    assert "<tr><th>split</th><th>classes</th><th>images</th></tr>" in html
    assert f"<tr><td>train</td><td>10</td><td>{train}</td></tr><tr><td>test</td><td>3</td><td>{test}</td></tr>" in html
    assert "&lt;folder&gt;" in html
    assert "<folder>" not in html


def test_notebooks_show_a_table_of_the_tasks(data):
    named = replace(data, load_arguments={"name": "<folder>"})
    html = named.tasks("test", ways=2, shots=1, queries=3)._repr_html_()
    columns = "<th>ways</th><th>shots per class</th><th>queries per class</th><th>classes</th><th>images</th>"
    cells = "".join(f"<td>{number}</td>" for number in (2, 1, 3, 3, sum(COUNTS[label] for label in SPLITS["test"])))
    assert f"<tr>{columns}</tr><tr>{cells}</tr></table>" in html
    assert "&lt;folder&gt;" in html
    assert "<folder>" not in html


def test_unknown_images_are_uniform_over_the_classes_outside_of_the_task_and_over_their_images(data):
    environment = data.tasks("train", ways=2, shots=1, queries=1)
    classes = torch.tensor([[1, 4], [0, 9]])
    images = environment.sample_unknown(classes, 40_000, seeded())
    assert torch.equal(images, environment.sample_unknown(classes, 40_000, seeded()))
    for task_images, task_classes in zip(images, classes):
        unknown = [data.splits["train"][index] for index in range(10) if index not in task_classes.tolist()]
        labels = data.labels[task_images]
        assert set(labels.tolist()) == {int(label) for label in unknown}
        for label in unknown:
            class_images = (data.labels == label).nonzero().squeeze(1)
            counts = torch.stack([(task_images == image).sum() for image in class_images]).double()
            expected = 40_000 / 8 / len(class_images)
            assert counts.sum() == pytest.approx(40_000 / 8, rel=0.05)
            assert ((counts - expected).abs() < 5 * expected**0.5).all()


def test_a_task_with_all_classes_has_no_unknown_images(data):
    environment = data.tasks("test", ways=3, shots=1, queries=1)
    with pytest.raises(InputError, match="ways is 3, but split 'test' has 3 classes, so no class is unknown"):
        environment.sample_unknown(torch.tensor([[0, 1, 2]]), 5, seeded())
