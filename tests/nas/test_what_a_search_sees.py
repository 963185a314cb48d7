import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from metabridge.environments import LabelledImages
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.models.cells import supernet
from metabridge.nas import OPERATORS, ActiveOperators, supernet_ntk
from metabridge.nas.architecture_search import Proxies, Search, TimeUpError, score_model
from metabridge.nas.linear_regions import thin
from metabridge.nas.proxies import Conditioning, Score
from metabridge.nas.pruning import Scores, importance
from metabridge.nas.supernet_ntk import Candidates
from small_searches import on_first_edge, small_search, thinned

FIRST, SECOND, THIRD = OPERATORS[:3]
DRAWS = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))  # seeds, rounds and repeats


@pytest.mark.parametrize("kernel", ["maml", "anil", "ntk"])
def test_a_search_hands_on_its_kernel_time_and_ridge(kernel: str) -> None:
    assert Search(kernel, time=2.0, ridge=0.5).conditioning == Conditioning(kernel, 2.0, 0.5)


def test_images_of_other_splits_are_not_seen(glyphs: LabelledImages) -> None:
    turned = replace(glyphs, images=glyphs.images.flip(0), labels=glyphs.labels.flip(0))  # training images come last
    train = torch.isin(turned.labels, turned.splits["train"]).view(-1, 1, 1, 1)
    blank = replace(turned, images=turned.images * train)
    scores = [dict(Proxies(small_search(inputs=500), images)(0, 0, thinned(), [None])) for images in (turned, blank)]
    assert scores[0] == scores[1]


def two_of_each() -> LabelledImages:
    """Two classes of two images, so that a task of two ways has all of them, in some order."""
    return LabelledImages(
        images=torch.randint(256, (4, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8),
        labels=torch.tensor([0, 0, 1, 1]),
        class_names=("a", "b"),
        superclasses=torch.zeros(2, dtype=torch.int64),
        superclass_names=("all",),
        splits={"train": torch.arange(2)},
    )


def test_seeds_rounds_and_repeats_have_weights_of_their_own() -> None:
    found = []
    for seed, number, repeat in DRAWS:
        ((_, scores),) = Proxies(small_search("ntk", tasks=1, seed=seed), two_of_each())(
            number, repeat, thinned(), [None]
        )
        found.append(scores.condition.value)
    assert all(one != pytest.approx(other, rel=0.01) for one, other in itertools.combinations(found, 2))


def test_seeds_rounds_and_repeats_have_tasks_of_their_own(glyphs: LabelledImages) -> None:
    class Noted:
        """Tasks of the glyphs, of which the supports are kept."""

        def __init__(self, proxies: Proxies) -> None:
            self.environment, self.image_indices = proxies.environment, proxies.environment.image_indices

        def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
            drawn = self.environment.sample(tasks, generator)
            supports.append(drawn.support_x)
            return drawn

    supports: list[Tensor] = []
    for seed, number, repeat in DRAWS:
        proxies = Proxies(small_search("none", seed=seed), glyphs)
        proxies.environment = Noted(proxies)
        list(proxies(number, repeat, thinned(), [None]))
    assert len(supports) == len(DRAWS)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(supports, 2))


def test_a_search_of_other_images_is_refused(glyphs: LabelledImages, tmp_path: Path) -> None:
    search = small_search("none", operators=("skip",))
    with pytest.raises(TimeUpError):
        search.run(replace(glyphs, load_arguments={"name": "one"}), out=tmp_path, minutes=0, progress=False)
    with pytest.raises(InputError, match="a search with data="):
        search.run(replace(glyphs, load_arguments={"name": "another"}), out=tmp_path, progress=False)


def test_a_search_of_other_images_is_refused_though_they_come_from_nowhere(tmp_path: Path) -> None:
    search, images = small_search("none", operators=("skip",)), two_of_each()
    with pytest.raises(TimeUpError):
        search.run(images, out=tmp_path, minutes=0, progress=False)
    others = (
        replace(images, images=255 - images.images),
        replace(images, labels=torch.tensor([0, 1, 0, 1])),
    )
    for other in others:
        with pytest.raises(InputError, match="a search with images='4 images, checksum"):
            search.run(other, out=tmp_path, progress=False)
    search.run(images, out=tmp_path, progress=False)


def test_patches_are_of_all_places_and_channels() -> None:
    images = torch.arange(2 * 5 * 6).view(1, 2, 5, 6).to(torch.uint8).expand(4, -1, -1, -1)
    patches = Proxies(small_search(inputs=2000), replace(two_of_each(), images=images))._patches(torch.Generator())
    assert patches.shape == (2000, 1, 3, 3)
    corners = (255 * patches).round().long().flatten(1)
    wanted = {30 * channel + 6 * top + left for channel in range(2) for top in range(3) for left in range(4)}
    assert set(corners[:, 0].tolist()) == wanted
    offsets = torch.tensor([6 * down + right for down in range(3) for right in range(3)])
    assert torch.equal(corners, corners[:, :1] + offsets)


def test_regions_are_counted_in_a_network_of_one_channel() -> None:
    features = thin(thinned(), seed=0, inputs=9).features
    assert (len(features.cells), features.channels, features.stem[0].layer.out_channels) == (3, 1, 3)


def test_a_model_is_scored_with_weights_of_its_own_in_every_repeat() -> None:
    search = Search("ntk", tasks=1, ways=2, repeats=3)
    found = score_model(search, "mlp", two_of_each()).each  # whose tasks all have the same images
    assert all(one.value != pytest.approx(other.value, rel=0.01) for one, other in itertools.combinations(found, 2))


def test_a_model_whose_regions_are_as_many_as_the_training_images_is_in_trouble() -> None:
    images = two_of_each()
    more = replace(
        images,
        images=torch.cat([images.images, images.images.flip(-1)]),
        labels=torch.tensor([0, 0, 1, 1, 2, 2, 2, 2]),
        class_names=("a", "b", "c"),
        superclasses=torch.zeros(3, dtype=torch.int64),
        splits={"train": torch.arange(2), "test": torch.tensor([2])},
    )
    (found,) = score_model(Search("none", ways=2, repeats=1), "mlp", more).each
    assert found == Score(4.0, "each of 4 images has a region of its own")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"inputs": 1}, "inputs is 1"),
        ({"cells": 3.5}, "cells is 3.5"),
        ({"cells": 2}, "cells is 2"),
        ({"seed": 10**12}, "seed is 1000000000000"),
    ],
)
def test_a_search_that_cannot_be_is_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        small_search(**options)


def test_proxies_refuse_images_that_are_too_small_and_ways_that_there_are_not() -> None:
    with pytest.raises(InputError, match="images has 8×2 pixels"):
        Proxies(small_search(), replace(two_of_each(), images=two_of_each().images[..., :2]))
    with pytest.raises(InputError, match="way is 'fsat'"):
        Proxies(small_search(), two_of_each(), way="fsat")


def test_networks_in_trouble_are_counted(glyphs: LabelledImages) -> None:
    black = replace(glyphs, images=torch.zeros_like(glyphs.images))  # no kernel tells their tasks apart
    by_kernel, by_regions = (
        small_search(kernel, operators=("skip",)).run(black, progress=False) for kernel in ("ntk", "none")
    )
    assert by_kernel.troubled == by_kernel.measured > 0
    assert by_regions.troubled == 0 < by_regions.measured


def test_a_whole_that_cannot_be_told_counts_as_the_median() -> None:
    def conditions(*values: float) -> list[Scores]:
        return [Scores(Score(value), None) for value in values]

    ranks = importance(
        {
            None: conditions(math.inf, 1.0),
            on_first_edge(FIRST): conditions(1.0, 4.5),  # the sums of what is left, relative to 3 and 1: 4.83,
            on_first_edge(SECOND): conditions(3.0, 4.0),  # 5,
            on_first_edge(THIRD): conditions(9.0, 1.0),  # and 4
        }
    )
    assert ranks == {on_first_edge(FIRST): 1, on_first_edge(SECOND): 2, on_first_edge(THIRD): 0}


def test_a_kernel_summed_in_many_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    active, removals = ActiveOperators.full(("skip", "conv_3x3")), [None, ("normal", 0, "skip")]
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    whole = dict(Candidates(net, active, x, side_by_side=2).grams(removals))
    monkeypatch.setattr(supernet_ntk, "AT_ONCE", 100)
    for removal, parts in Candidates(net, active, x, side_by_side=2).grams(removals):
        torch.testing.assert_close(parts.ntk, whole[removal].ntk, rtol=1e-9, atol=1e-12)
