import itertools
import subprocess
import sys
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import Tensor

from metabridge.environments import LabeledImages
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.models.cells import supernet
from metabridge.nas import (
    ActiveOperators,
    Architecture,
    ConditionNumber,
    ProxyScore,
    SearchConfig,
    TimeLimitError,
    run_search,
    score_model,
    search,
    supernet_ntk,
)
from metabridge.nas.architecture_search import ProxyEvaluator
from metabridge.nas.linear_regions import thin_supernet
from metabridge.nas.pruning import count_evaluations
from metabridge.nas.supernet_ntk import CandidateKernels
from small_searches import small_search, two_operators_per_edge

SEEDS_ROUNDS_REPEATS = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))


def test_search_has_the_options_of_its_configuration_with_the_same_defaults() -> None:
    parameters = signature(search).parameters
    assert {name: parameters[name].default for name in asdict(SearchConfig())} == asdict(SearchConfig())


def test_search_equals_a_run_of_its_configuration(glyphs: LabeledImages) -> None:
    config = small_search("none", operators=("skip",))
    result, expected = search(glyphs, **asdict(config), progress=False), run_search(glyphs, config, progress=False)
    assert result.architecture == expected.architecture
    assert result.evaluated == expected.evaluated == 19  # the whole network, and one without each of 18 operators


@pytest.mark.parametrize("kernel", ["maml", "anil", "ntk"])
def test_the_proxy_of_a_search_has_its_kernel_time_and_ridge(kernel: str) -> None:
    config = SearchConfig(kernel, adaptation_time=2.0, ridge=0.5)
    assert config.condition_number == ConditionNumber(kernel, 2.0, 0.5)


def test_images_of_other_splits_have_no_influence(glyphs: LabeledImages) -> None:
    # flipped, so that the training images come last
    flipped = replace(glyphs, images=glyphs.images.flip(0), labels=glyphs.labels.flip(0))
    is_training = torch.isin(flipped.labels, flipped.splits["train"]).view(-1, 1, 1, 1)
    only_training_images = replace(flipped, images=flipped.images * is_training)
    config = small_search(region_inputs=500)
    scores = [
        dict(ProxyEvaluator(config, images)(0, 0, two_operators_per_edge(), [None]))
        for images in (flipped, only_training_images)
    ]
    assert scores[0] == scores[1]


def two_images_of_two_classes() -> LabeledImages:
    """Return so few images that every task with two ways contains all of them, in some order."""
    return LabeledImages(
        images=torch.randint(256, (4, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8),
        labels=torch.tensor([0, 0, 1, 1]),
        class_names=("a", "b"),
        superclasses=torch.zeros(2, dtype=torch.int64),
        superclass_names=("all",),
        splits={"train": torch.arange(2)},
    )


def test_weights_depend_on_seed_round_and_repeat() -> None:
    values = []
    for seed, round_index, repeat in SEEDS_ROUNDS_REPEATS:
        evaluator = ProxyEvaluator(small_search("ntk", tasks=1, seed=seed), two_images_of_two_classes())
        ((_, scores),) = evaluator(round_index, repeat, two_operators_per_edge(), [None])
        values.append(scores.condition.value)
    assert all(first != pytest.approx(second, rel=0.01) for first, second in itertools.combinations(values, 2))


def test_tasks_depend_on_seed_round_and_repeat(glyphs: LabeledImages) -> None:
    class Recorder:
        """An environment that records the support sets it samples."""

        def __init__(self, evaluator: ProxyEvaluator) -> None:
            self.environment, self.image_indices = evaluator.environment, evaluator.environment.image_indices

        def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
            episodes = self.environment.sample(tasks, generator)
            support_sets.append(episodes.support_x)
            return episodes

    support_sets: list[Tensor] = []
    for seed, round_index, repeat in SEEDS_ROUNDS_REPEATS:
        evaluator = ProxyEvaluator(small_search("none", seed=seed), glyphs)
        evaluator.environment = Recorder(evaluator)
        list(evaluator(round_index, repeat, two_operators_per_edge(), [None]))
    assert len(support_sets) == len(SEEDS_ROUNDS_REPEATS)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(support_sets, 2))


def test_scores_of_one_evaluator_depend_only_on_the_round_and_the_repeat(glyphs: LabeledImages) -> None:
    evaluator = ProxyEvaluator(small_search(), glyphs)
    values = []
    for round_index, repeat in ((0, 0), (0, 1), (1, 0), (0, 0)):
        ((_, scores),) = evaluator(round_index, repeat, two_operators_per_edge(), [None])
        values.append(scores.condition.value)
    assert len(set(values)) == 3
    assert values[0] == values[3]


@pytest.mark.parametrize("kernel", ["maml", "none"])
def test_fast_and_reference_implementation_give_the_same_scores(glyphs: LabeledImages, kernel: str) -> None:
    removals = [None, ("normal", 2, "skip"), ("reduction", 0, "avg_pool_3x3")]
    evaluators = (
        ProxyEvaluator(small_search(kernel), glyphs, implementation=implementation)
        for implementation in ("fast", "reference")
    )
    fast, reference = (dict(evaluator(1, 0, two_operators_per_edge(), removals)) for evaluator in evaluators)
    assert fast.keys() == reference.keys() == set(removals)
    for removal in removals:
        assert fast[removal].regions == reference[removal].regions
        if kernel == "none":
            assert fast[removal].condition is None
        else:
            assert fast[removal].condition.value == pytest.approx(reference[removal].condition.value, rel=1e-3)


def test_continuing_with_other_data_is_rejected(glyphs: LabeledImages, tmp_path: Path) -> None:
    config = small_search("none", operators=("skip",))
    images, other_images = (replace(glyphs, load_arguments={"name": name}) for name in ("photos", "drawings"))
    with pytest.raises(TimeLimitError):
        run_search(images, config, out=tmp_path, minutes=0, progress=False)
    with pytest.raises(InputError, match="a search with data="):
        run_search(other_images, config, out=tmp_path, progress=False)


def test_continuing_with_other_images_in_memory_is_rejected(tmp_path: Path) -> None:
    config, images = small_search("none", operators=("skip",)), two_images_of_two_classes()
    with pytest.raises(TimeLimitError):
        run_search(images, config, out=tmp_path, minutes=0, progress=False)
    changed_images = (
        replace(images, images=255 - images.images),
        replace(images, labels=torch.tensor([0, 1, 0, 1])),
    )
    for other_images in changed_images:
        with pytest.raises(InputError, match="a search with images='4 images, checksum"):
            run_search(other_images, config, out=tmp_path, progress=False)
    run_search(images, config, out=tmp_path, progress=False)


def test_patches_cover_all_positions_and_channels() -> None:
    # The value of a pixel is its index in the image: 30 · channel + 6 · row + column.
    images = torch.arange(2 * 5 * 6).view(1, 2, 5, 6).to(torch.uint8).expand(4, -1, -1, -1)
    data = replace(two_images_of_two_classes(), images=images)
    patches = ProxyEvaluator(small_search(region_inputs=2000), data)._patches(torch.Generator())
    assert patches.shape == (2000, 1, 3, 3)
    pixels = (255 * patches).round().long().flatten(1)
    corners = {30 * channel + 6 * top + left for channel in range(2) for top in range(3) for left in range(4)}
    assert set(pixels[:, 0].tolist()) == corners
    offsets = torch.tensor([6 * down + right for down in range(3) for right in range(3)])
    assert torch.equal(pixels, pixels[:, :1] + offsets)


def test_regions_are_counted_in_a_network_of_one_channel() -> None:
    features = thin_supernet(two_operators_per_edge(), seed=0, patch_count=9).features  # its stem has three channels
    assert (len(features.cells), features.channels, features.stem[0].layer.out_channels) == (3, 1, 3)


def test_the_weights_of_a_scored_model_depend_on_the_repeat() -> None:
    config = SearchConfig("ntk", tasks=1, ways=2, repeats=3)
    scores = score_model("mlp", two_images_of_two_classes(), config).repeats  # all of its tasks have the same images
    pairs = itertools.combinations(scores, 2)
    assert all(first.value != pytest.approx(second.value, rel=0.01) for first, second in pairs)


def test_a_separate_region_for_every_image_is_a_failure() -> None:
    images = two_images_of_two_classes()
    images_of_two_splits = replace(
        images,
        images=torch.cat([images.images, images.images.flip(-1)]),
        labels=torch.tensor([0, 0, 1, 1, 2, 2, 2, 2]),
        class_names=("a", "b", "c"),
        superclasses=torch.zeros(3, dtype=torch.int64),
        splits={"train": torch.arange(2), "test": torch.tensor([2])},
    )
    (score,) = score_model("mlp", images_of_two_splits, SearchConfig("none", ways=2, repeats=1)).repeats
    assert score == ProxyScore(4.0, "each of 4 images has its own region")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region_inputs": 1}, "region_inputs is 1"),
        ({"cells": 3.5}, "cells is 3.5"),
        ({"cells": 2}, "cells is 2"),
        ({"seed": 10**12}, "seed is 1000000000000"),
        ({"adaptation_time": 0.0}, "adaptation_time is 0.0"),
        ({"ridge": -1.0}, "ridge is -1.0"),
        ({"operators": ()}, "operators is empty"),
        ({"operators": ("conv_9x9",)}, "operator 'conv_9x9' is unknown"),
        ({"kernel": "mtl"}, "kernel is 'mtl'"),
    ],
)
def test_invalid_settings_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SearchConfig(**options)


def test_small_images_and_unknown_implementations_are_rejected() -> None:
    images = two_images_of_two_classes()
    with pytest.raises(InputError, match="images have 8×2 pixels"):
        ProxyEvaluator(small_search(), replace(images, images=images.images[..., :2]))
    with pytest.raises(InputError, match="implementation is 'fsat'"):
        ProxyEvaluator(small_search(), images, implementation="fsat")


@pytest.mark.parametrize("implementation", ["fast", "reference"])
def test_a_supernet_that_is_too_large_is_rejected_before_it_is_built(
    glyphs: LabeledImages, tmp_path: Path, implementation: str
) -> None:
    config = small_search(channels=10**9)
    with pytest.raises(InputError, match="too large to build"):
        run_search(glyphs, config, out=tmp_path / "search", implementation=implementation, progress=False)
    assert not (tmp_path / "search").exists()


def test_networks_with_a_failed_proxy_are_counted(glyphs: LabeledImages) -> None:
    black_images = replace(glyphs, images=torch.zeros_like(glyphs.images))  # equal images make every kernel singular
    kernel_search, region_search = (
        run_search(black_images, small_search(kernel, operators=("skip",)), progress=False)
        for kernel in ("ntk", "none")
    )
    assert kernel_search.failed == kernel_search.evaluated > 0
    assert region_search.failed == 0 < region_search.evaluated


def test_a_kernel_summed_in_many_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    active, removals = ActiveOperators.full(("skip", "conv_3x3")), [None, ("normal", 0, "skip")]
    net, x = supernet(active, cells=3, channels=2, size=8).double(), torch.rand(3, 3, 8, 8, dtype=torch.float64)
    expected = dict(CandidateKernels(net, active, x, candidates_per_pass=2).matrices(removals))
    monkeypatch.setattr(supernet_ntk, "GRADIENT_ENTRIES_PER_PRODUCT", 100)
    for removal, matrices in CandidateKernels(net, active, x, candidates_per_pass=2).matrices(removals):
        torch.testing.assert_close(matrices.ntk, expected[removal].ntk, rtol=1e-9, atol=1e-12)


def test_random_cells_depend_on_the_seed_alone(glyphs: LabeledImages) -> None:
    architecture, with_same_seed, with_other_seed = (
        run_search(glyphs, small_search("random", seed=seed)).architecture for seed in (0, 0, 1)
    )
    assert architecture == with_same_seed != with_other_seed


def test_a_search_is_continued_after_its_time_limit(glyphs: LabeledImages, tmp_path: Path) -> None:
    config = small_search("none", operators=("skip", "conv_3x3"))
    with pytest.raises(TimeLimitError, match="Run the same search with the same `out` again to continue it"):
        run_search(glyphs, config, out=tmp_path, minutes=0, progress=False)
    assert not (tmp_path / "architecture.json").exists()
    result = run_search(glyphs, config, out=tmp_path, progress=False)
    assert Architecture.load(tmp_path / "architecture.json") == result.architecture
    assert {operator for _, _, operator in result.architecture.active_operators} <= set(config.operators)
    assert result.evaluated == count_evaluations(ActiveOperators.full(config.operators), 1)
    repeated = run_search(glyphs, config, out=tmp_path, progress=False)
    assert repeated.architecture == result.architecture
    assert repeated.seconds > result.seconds
    with pytest.raises(InputError, match="seed"):
        run_search(glyphs, replace(config, seed=1), out=tmp_path, progress=False)


@pytest.mark.skipif(sys.platform == "win32", reason="a folder with an open file cannot be moved there")
def test_a_search_does_not_write_into_a_folder_that_replaced_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glyphs: LabeledImages
) -> None:
    folder, evaluate = tmp_path / "search", ProxyEvaluator.__call__

    def replace_folder(self, *args):
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        return evaluate(self, *args)

    monkeypatch.setattr(ProxyEvaluator, "__call__", replace_folder)
    with pytest.raises(InputError, match="is not the one that was locked"):
        run_search(glyphs, small_search("none"), out=folder, progress=False)
    assert not list(folder.iterdir())


PAUSED_SEARCH = """
import sys
sys.path.insert(0, {tests!r})
from metabridge.datasets import load_glyphs
from metabridge.nas import run_search
from metabridge.nas.architecture_search import ProxyEvaluator
from small_searches import small_search

evaluate = ProxyEvaluator.__call__

def pause_after_three(self, *args):
    for index, scores in enumerate(evaluate(self, *args)):
        yield scores
        if index == 2:
            print("searching", flush=True)
            sys.stdin.read()

ProxyEvaluator.__call__ = pause_after_three
run_search(load_glyphs(), small_search("none", operators=("skip", "conv_3x3")), out=sys.argv[1], progress=False)
"""


def test_a_folder_in_use_is_rejected_and_a_killed_search_is_continued(glyphs: LabeledImages, tmp_path: Path) -> None:
    config, out = small_search("none", operators=("skip", "conv_3x3")), tmp_path / "search"
    program = PAUSED_SEARCH.format(tests=str(Path(__file__).parent.parent))
    command = [sys.executable, "-c", program, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "searching\n"
        log_before = (out / "search.jsonl").read_bytes()
        with pytest.raises(InputError, match=f"is in use by process {process.pid} on"):
            run_search(glyphs, config, out=out, progress=False)
        assert (out / "search.jsonl").read_bytes() == log_before
        process.kill()
    result = run_search(glyphs, config, out=out, progress=False)
    assert result.architecture == run_search(glyphs, config, progress=False).architecture
    assert result.evaluated == count_evaluations(ActiveOperators.full(config.operators), 1)
    assert {file.name for file in out.iterdir()} == {"search.jsonl", "architecture.json"}
