from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from metabridge import method
from metabridge.environments import Environment, Mixture, Sinusoid
from metabridge.errors import InputError
from metabridge.models import conv4
from metabridge.training import fit


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def within_binomial(count: int, trials: int, probability: float) -> bool:
    """Return whether a binomial count is within four standard deviations of its mean."""
    return abs(count - trials * probability) < 4 * math.sqrt(trials * probability * (1 - probability))


@pytest.fixture
def same_shape_pair(glyphs):
    """Return two environments: easy and hard tasks of the same shape, from different splits."""
    return (
        glyphs.tasks("train", ways=3, queries=1, superclass="different"),
        glyphs.tasks("test", ways=3, queries=1, superclass="same"),
    )


@pytest.fixture
def different_shape_pair(glyphs):
    """Return two environments: 2-way and 5-way tasks, from the same split."""
    return glyphs.tasks("train", ways=2, shots=3, queries=2), glyphs.tasks("train", ways=5, shots=1, queries=2)


def test_each_task_is_sampled_from_an_environment_with_the_given_probability():
    mixture: Environment = Mixture((Sinusoid(), _ZeroInputs()), (3.0, 1.0))
    tasks = mixture.sample(4000, seeded())
    assert len(tasks) == 4000
    assert within_binomial(int((tasks.support_x == 0).all(dim=1).sum()), 4000, 0.25)
    counts = {int((mixture.sample(8, seeded(seed)).support_x == 0).all(dim=1).sum()) for seed in range(40)}
    assert len(counts) > 3  # otherwise, every batch would have the same share of both environments


class _ZeroInputs:
    """Sinusoids whose inputs are all 0."""

    outputs = 1

    def sample(self, tasks, generator):
        return Sinusoid().sample(tasks, generator).map_inputs(torch.zeros_like)


def test_all_tasks_of_a_batch_are_from_one_environment_if_shapes_differ(different_shape_pair):
    mixture, generator = Mixture(different_shape_pair, (0.8, 0.2)), seeded()
    shapes = [tuple(mixture.sample(2, generator).support_x.shape[:2]) for _ in range(400)]
    assert set(shapes) == {(2, 6), (2, 5)}
    assert within_binomial(shapes.count((2, 5)), 400, 0.2)


def test_the_same_seed_gives_the_same_tasks_and_another_seed_gives_different_tasks(
    same_shape_pair, different_shape_pair
):
    for environments in (same_shape_pair, different_shape_pair):
        mixture = Mixture(environments, (0.5, 0.5))
        tasks, same_seed = (mixture.sample(4, seeded(7)) for _ in range(2))
        assert torch.equal(tasks.query_x, same_seed.query_x)
        other_seed = mixture.sample(4, seeded(8))
        assert tasks.query_x.shape != other_seed.query_x.shape or not torch.equal(tasks.query_x, other_seed.query_x)


def test_tasks_of_a_mixture_are_those_of_its_environments(glyphs, same_shape_pair):
    mixture = Mixture(same_shape_pair, (0.0, 1.0))
    generator = seeded()
    # a mixture first draws the environment of each task
    torch.multinomial(torch.ones(2), 5, replacement=True, generator=generator)
    expected = same_shape_pair[1].sample(5, generator)
    assert torch.equal(mixture.sample(5, seeded()).support_x, expected.support_x)


@pytest.mark.parametrize("shots", [1, 2])
def test_environments_that_share_their_images_give_the_same_tasks_as_with_copied_images(glyphs, shots):
    copied_glyphs = replace(glyphs, images=glyphs.images.clone())  # so that the images are loaded separately
    easy = glyphs.tasks("train", shots=shots, superclass="different")
    shared, separate = (
        Mixture((easy, data.tasks("train", shots=shots)), (0.5, 0.5)) for data in (glyphs, copied_glyphs)
    )
    for seed in range(3):
        first_batch, second_batch = (mixture.sample(7, seeded(seed)).tensors() for mixture in (shared, separate))
        assert len(first_batch) == len(second_batch) == 5  # inputs and targets of both sets, and classes
        assert all(torch.equal(one, other) for one, other in zip(first_batch, second_batch))


def test_classes_are_none_if_the_environments_have_different_classes(same_shape_pair):
    mixture = Mixture(same_shape_pair, (0.5, 0.5))
    assert mixture.classes is None
    assert mixture.sample(4, seeded()).classes is None


def test_classes_are_kept_if_the_environments_have_the_same_classes(different_shape_pair, glyphs):
    mixture = Mixture(different_shape_pair, (0.5, 0.5))
    assert mixture.classes == len(glyphs.splits["train"])
    tasks = mixture.sample(3, seeded())
    assert tasks.classes.shape == (3, int(tasks.support_y.max()) + 1)


def test_tasks_with_equal_numbers_of_images_but_different_ways_are_mixed(glyphs):
    environments = [  # both have 5 · 4 = 10 · 2 query images
        glyphs.tasks("train", ways=5, shots=2, queries=4),
        glyphs.tasks("test", ways=10, shots=1, queries=2),
    ]
    assert Mixture(environments, (0.5, 0.5)).sample(8, seeded()).query_x.shape == (8, 20, 1, 28, 28)


def test_a_mixture_of_batches_without_a_query_set_has_no_query_set(glyphs):
    batches = glyphs.batches("train", size=4)
    assert not Mixture((batches, batches), (0.5, 0.5)).sample(6, seeded()).is_split


@pytest.mark.parametrize("name", ["maml", "nal"])
def test_a_network_can_be_trained_on_tasks_of_two_shapes(different_shape_pair, name):
    mixture = Mixture(different_shape_pair, (0.5, 0.5))
    assert mixture.outputs == 5
    net = conv4(channels=1, size=28, outputs=mixture.outputs, filters=4)
    run = fit(net, method(name, steps=1, lr=0.1), mixture, iterations=8, batch_size=2, progress=False)
    assert math.isfinite(run.curve[-1].loss)


def test_a_mixture_with_different_classes_rejects_a_method_with_a_row_per_class(same_shape_pair):
    net = conv4(channels=1, size=28, outputs=3, filters=4)
    with pytest.raises(
        InputError, match="classes is None, but training_head 'task-rows' has one row per training class"
    ):
        fit(net, method("mtl"), Mixture(same_shape_pair, (0.5, 0.5)), iterations=1, progress=False)


@pytest.mark.parametrize(
    ("environments", "weights", "sentence"),
    [
        ((), (), "there are 0 environments and 0 weights"),
        ((Sinusoid(),), (0.5, 0.5), "there are 1 environments and 2 weights"),
        ((Sinusoid(), Sinusoid()), (1.0, -1.0), r"weights is \(1.0, -1.0\), but weights must be finite"),
        ((Sinusoid(), Sinusoid()), (0.0, 0.0), "not all 0"),
        ((Sinusoid(), Sinusoid()), (math.nan, 1.0), "must be finite"),
        ((Mixture((Sinusoid(),), (1.0,)),), (1.0,), "environments contains a Mixture"),
    ],
)
def test_invalid_mixtures_are_rejected(environments, weights, sentence):
    with pytest.raises(InputError, match=sentence):
        Mixture(environments, weights)
