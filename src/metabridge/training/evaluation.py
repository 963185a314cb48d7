"""Evaluation: how well a trained model adapts to new tasks, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from metabridge.environments.environment import Environment, check_environment
from metabridge.environments.image_tasks import ImageTasks, TaskIndices, copy_to_device
from metabridge.episodes import Episodes
from metabridge.errors import InputError, type_with_article
from metabridge.html_table import html_table
from metabridge.intervals import half_width
from metabridge.learners.adapt import can_predict_from_features, predict, predict_from_features
from metabridge.learners.method import Method, method_name
from metabridge.learners.parameters import check_channels, check_test_time, network_name
from metabridge.models.batch_norm import running_batch_norms, uses_batch_statistics
from metabridge.models.functional_call import shallow_copy
from metabridge.models.network import Network, Params, apply_features
from metabridge.progress import track_progress
from metabridge.training.augment import Augment
from metabridge.training.feature_cache import cached_features, caches_features

Metric = Literal["accuracy", "squared error"]
# Number of tasks that are sampled at once. The tasks that a seed gives depend on this number, so it is the same for all
# models and devices.
BLOCK_SIZE = 16


@dataclass(frozen=True, repr=False)
class Model:
    """A network with its method and parameters: everything that is needed to adapt and predict.

    Args:
        method: The method, which adapts to tasks.
        net: The network.
        params: All trained parameters: the network's and the method's, such as learned step sizes.
        dtype: Data type in which features are computed. None for the dtype of the parameters.

    >>> import metabridge as mb
    >>> maml, net = mb.method("maml"), mb.models.mlp(1, 1)
    >>> mb.Model(maml, net, mb.parameters(maml, net))
    Model(maml, mlp)
    """

    method: Method
    net: Network
    params: Params
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.params["head.weight"].device

    @property
    def model_name(self) -> str:
        """Name of the function that built the network, or of its class if it was not built by `metabridge.models`."""
        return network_name(self.net)

    def to(self, device: torch.device) -> Model:
        """Return the model on another device, in evaluation mode, as a copy that later training does not change.

        Args:
            device: A PyTorch device.

        Returns:
            The model.
        """
        net = deepcopy(self.net).to(device).eval()
        params = {name: value.detach().to(device, copy=True) for name, value in self.params.items()}
        return replace(self, net=net, params=params)

    def predict(self, episodes: Episodes) -> Tensor:
        """Adapt to the support set of each task and predict its queries, in evaluation mode.

        Args:
            episodes: The tasks.

        Returns:
            Outputs (tasks, queries, outputs).
        """
        return predict(self.method, self._net_in_evaluation_mode(), self.params, episodes, dtype=self.dtype)

    def features(self, images: Tensor) -> Tensor:
        """Return the features of images, in evaluation mode.

        Args:
            images: Images (n, channels, height, width).

        Returns:
            Features (n, dimension).
        """
        with torch.no_grad():
            return apply_features(self._net_in_evaluation_mode(), self.params, images, self.dtype)

    def _net_in_evaluation_mode(self) -> Network:
        """Return the network in evaluation mode.

        A network in training mode is not changed, since another thread may use it: the result is a copy that shares its
        tensors.
        """
        return shallow_copy(self.net).eval() if any(layer.training for layer in self.net.modules()) else self.net

    def __repr__(self) -> str:
        return f"Model({method_name(self.method)}, {self.model_name})"


@dataclass(frozen=True, eq=False)
class Score:
    """Mean score over tasks with its 95 % confidence interval: accuracy, or squared error for regression.

    Args:
        mean: Mean over the tasks. NaN if adaptation diverged on all tasks; for regression, if it diverged on any task.
        ci95: Half-width of the interval.
        tasks: Number of tasks.
        values: Score of each task, (tasks,). Empty if the score was read from a saved run.
        metric: "accuracy" or "squared error".
        diverged: Number of tasks on which adaptation diverged.

    >>> import torch
    >>> import metabridge as mb
    >>> score = mb.Score.of(torch.tensor([0.6, 0.8, 0.7]))
    >>> score.tasks, round(score.mean, 2), str(score)
    (3, 0.7, '70.0 ± 24.8 %')
    """

    mean: float
    ci95: float
    tasks: int
    values: Tensor
    metric: Metric = "accuracy"
    diverged: int = 0

    @classmethod
    def of(cls, values: Tensor, metric: Metric = "accuracy", *, diverged: int = 0) -> Score:
        """Return the mean of one value per task, with the confidence interval of Student's t-distribution.

        Args:
            values: Score of each task (tasks,).
            metric: "accuracy" or "squared error".
            diverged: Number of tasks on which adaptation diverged.

        Returns:
            The score.

        >>> Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0]))
        Score(mean=0.750, ci95=0.796, tasks=4)
        """
        values = values.double().cpu()
        if diverged == len(values):
            values = torch.full_like(values, math.nan)
        return cls(float(values.mean()), half_width(values), len(values), values, metric, diverged)

    def beats(self, other: Score) -> bool:
        """Return whether this score is better; any number is better than NaN.

        Args:
            other: Score to compare with.

        Returns:
            True if the accuracy is higher, or the squared error lower.
        """
        if math.isnan(self.mean) or math.isnan(other.mean):
            return not math.isnan(self.mean)
        return self.mean > other.mean if self.metric == "accuracy" else self.mean < other.mean

    def minus(self, other: Score) -> Score:
        """Return the mean difference to another score on the same tasks, paired by task.

        The interval of this difference is usually narrower than if the scores were measured on different tasks, since
        the difficulty of the tasks cancels.

        Args:
            other: Score of another model on the same tasks.

        Returns:
            The mean difference with its interval.

        Raises:
            InputError: If the numbers of tasks differ.

        >>> Score.of(torch.tensor([0.6, 0.8])).minus(Score.of(torch.tensor([0.5, 0.7])))
        Score(mean=0.100, ci95=0.000, tasks=2)
        """
        if self.tasks != other.tasks:
            raise InputError(
                f"the scores are means over {self.tasks} and {other.tasks} tasks, but must be over the same tasks. "
                "Evaluate both with the same number of tasks and the same seed."
            )
        return Score.of(self.values - other.values, self.metric)

    def __str__(self) -> str:
        """Return the mean and the half-width of the interval; accuracies are in percent.

        >>> str(Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0])))
        '75.0 ± 79.6 %'
        >>> str(Score.of(torch.tensor([0.0, 1.0, 1.0, 1.0]), diverged=1))
        '75.0 ± 79.6 % (adaptation diverged on 1 of 4 tasks)'
        """
        note = f" (adaptation diverged on {self.diverged} of {self.tasks} tasks)" if self.diverged else ""
        if self.metric == "accuracy":
            return f"{100 * self.mean:.1f} ± {100 * self.ci95:.1f} %{note}"
        return f"{self.mean:.3g} ± {self.ci95:.2g}{note}"

    def __repr__(self) -> str:
        return f"Score(mean={self.mean:.3f}, ci95={self.ci95:.3f}, tasks={self.tasks})"

    def _repr_html_(self) -> str:
        """Return a table of the score, for notebooks."""
        return html_table("Score", (self.metric, "tasks"), [(str(self), f"{self.tasks:,}")])


class Predictor(Protocol):
    """The protocol of models that `evaluate` accepts: a trained `Model`, or a kernel predictor."""

    @property
    def device(self) -> torch.device:
        """Device of the outputs."""
        ...

    def predict(self, episodes: Episodes) -> Tensor:
        """Adapt to the support set of each task and predict its queries.

        Args:
            episodes: The tasks.

        Returns:
            Outputs (tasks, queries, outputs).
        """
        ...


@dataclass(frozen=True)
class TestTimeAugmentation:
    """Changes to images at test time, for models that fit a head on fixed features.

    Args:
        copies: Number of randomly changed copies of each support image that are added to the support set.
        mirrored: Whether to average the features of each image and its mirror image.
        rotated: Whether to concatenate the features of the image rotated by 0, 90, 180 and 270 degrees.
        cropped: Whether the average includes the features of five crops of the image (the corners and the center),
            each with three quarters of the image's height and width.
        augment: Random changes to the copies. None: `Augment.for_size` for the size of the images.

    Raises:
        InputError: If `copies` is negative.

    >>> str(TestTimeAugmentation(mirrored=True, rotated=True))
    'flips, rotations'
    """

    copies: int = 0
    mirrored: bool = False
    rotated: bool = False
    cropped: bool = False
    augment: Augment | None = None

    __test__ = False  # tells pytest that this is not a test class

    def __post_init__(self) -> None:
        if self.copies < 0:
            raise InputError(f"copies is {self.copies}, but must be 0 or more. Use copies=0.")

    def __str__(self) -> str:
        changes = {
            f"{self.copies} copies": self.copies > 0,
            "flips": self.mirrored,
            "crops": self.cropped,
            "rotations": self.rotated,
        }
        return ", ".join(name for name, used in changes.items() if used) or "plain images"

    def features(self, model: Model, images: Tensor) -> Tensor:
        """Return the features of images, averaged over mirror images and crops and concatenated over rotations.

        Args:
            model: The model that computes the features.
            images: Images (n, channels, height, width).

        Returns:
            Features (n, dimension); the dimension is four times as large if `rotated` is true.
        """
        views = [images, *_crops(images)] if self.cropped else [images]
        if self.mirrored:
            views += [view.flip(-1) for view in views]
        rotated_features = [
            torch.stack([model.features(view.rot90(quarter_turns, (-2, -1))) for view in views]).mean(0)
            for quarter_turns in range(4 if self.rotated else 1)
        ]
        return torch.cat(rotated_features, -1)


NO_AUGMENTATION = TestTimeAugmentation()
PredictorT = TypeVar("PredictorT", bound=Predictor)


def _crops(images: Tensor) -> list[Tensor]:
    """Return crops of the corners and the center with 3/4 of the height and width, resized to the full size."""
    height, width = images.shape[-2:]
    crop_height, crop_width = -(-3 * height // 4), -(-3 * width // 4)  # rounded up
    bottom, right = height - crop_height, width - crop_width
    offsets = [(0, 0), (0, right), (bottom, 0), (bottom, right), (bottom // 2, right // 2)]
    crops = [images[..., top : top + crop_height, left : left + crop_width] for top, left in offsets]
    return [F.interpolate(crop, (height, width), mode="bilinear", align_corners=False) for crop in crops]


def evaluate(
    model: Predictor,
    environment: Environment,
    *,
    tasks: int = 600,
    seed: int = 0,
    augmentation: TestTimeAugmentation = NO_AUGMENTATION,
    progress: bool = False,
) -> Score:
    """Adapt a model to tasks of an environment and score its predictions of their queries.

    With the same seed, all models are evaluated on the same tasks, so their scores can be compared task by task with
    `Score.minus`. A query whose outputs are not finite counts as wrong; `Score.diverged` is the number of tasks with
    such queries.

    Args:
        model: Trained model, or a kernel predictor.
        environment: Source of the tasks.
        tasks: Number of tasks, at least 2.
        seed: Seed of the tasks.
        augmentation: Changes to the images at test time.
        progress: Whether to show a progress bar while the features of all images are computed. No bar is shown if the
            features of an image depend on the task or on other images, since they are then computed for every task.

    Returns:
        Mean accuracy, or mean squared error for regression, with its 95 % confidence interval.

    Raises:
        InputError: If there are fewer than 2 tasks, the weights are not finite, or the model cannot be evaluated on
            these tasks.

    >>> import metabridge as mb
    >>> maml, net = mb.method("maml"), mb.models.mlp(1, 1)
    >>> model = mb.Model(maml, net, mb.parameters(maml, net))
    >>> mb.evaluate(model, mb.environments.Sinusoid(), tasks=20).tasks
    20
    """
    scorer = Scorer()
    for outputs, episodes in predictions(
        model, environment, tasks=tasks, seed=seed, augmentation=augmentation, progress=progress
    ):
        scorer.add(outputs, episodes)
    return scorer.score()


def select_model(models: Iterable[PredictorT], environment: Environment, *, tasks: int, seed: int = 0) -> PredictorT:
    """Return the model with the best score on validation tasks. If several are equally good, return the first.

    Args:
        models: Trained models or kernel predictors, at least one. If this is an iterator, at most two of them are in
            memory at the same time.
        environment: Source of the validation tasks.
        tasks: Number of tasks, at least 2.
        seed: Seed of the tasks.

    Returns:
        The best model.

    Raises:
        InputError: If there are no models, or `evaluate` raises it.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.kernels import KernelLearner, fully_connected_kernel
    >>> train = Sinusoid().sample(10, torch.Generator().manual_seed(0))
    >>> kernel = fully_connected_kernel(depth=3, bias_variance=0.1)
    >>> learners = [KernelLearner(kernel, "maml", ridge=ridge).fit(train) for ridge in (0.01, 1.0)]
    >>> select_model(learners, Sinusoid(), tasks=10) in learners
    True
    """
    best: tuple[PredictorT, Score] | None = None
    for model in models:
        score = evaluate(model, environment, tasks=tasks, seed=seed)
        if best is None or score.beats(best[1]):
            best = model, score
    if best is None:
        raise InputError("models is empty, but must have at least one model.")
    return best[0]


def predictions(
    model: Predictor,
    environment: Environment,
    *,
    tasks: int,
    seed: int = 0,
    augmentation: TestTimeAugmentation = NO_AUGMENTATION,
    progress: bool = False,
    table: FeatureTable | None = None,
) -> Iterator[tuple[Tensor, Episodes]]:
    """Sample tasks in batches, adapt to them, and yield the outputs for their queries together with the tasks.

    If the features of an image depend on neither the task nor other images, they are computed only once per image, or
    taken from `table`.
    """
    check_task_count(tasks)
    check_predictor(model, environment)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Model) and has_fixed_features(model) and isinstance(environment, ImageTasks):
        if table is None:
            table = FeatureTable.of(model, environment, augmentation, seed=seed, progress=progress)
        yield from table.predictions(model, environment, tasks, generator)
        return
    if augmentation != NO_AUGMENTATION:
        raise InputError(
            f"augmentation is {augmentation}, but this model's features depend on the task, or the tasks are not image "
            "tasks. Use image tasks, a method that adapts only the head, and a network with running statistics."
        )
    max_batch_size = BLOCK_SIZE if model.device.type == "cpu" else 6 * BLOCK_SIZE  # large batches keep a GPU busy
    for size in _batch_sizes(tasks, max_batch_size):
        episodes = _sample_in_blocks(environment, size, generator, model.device)
        yield model.predict(episodes), episodes


def check_task_count(tasks: int) -> None:
    """Raise an `InputError` if there are too few tasks for a confidence interval."""
    if tasks < 2:
        raise InputError(f"tasks is {tasks}, but a confidence interval needs at least 2. Use tasks=2 or more.")


def check_predictor(model: Predictor, environment: Environment) -> None:
    """Raise an `InputError` if an argument of `evaluate` has the wrong type, or the weights of a model are invalid."""
    if not (hasattr(model, "predict") and hasattr(model, "device")):
        raise InputError(f"model is {type_with_article(model)}, but must be a Model. Pass the run that fit returns.")
    check_environment("environment", environment)
    if isinstance(model, Model):
        check_finite(model.params, dict(model.net.named_buffers()))
        _check_statistics(model)


def has_fixed_features(model: Model) -> bool:
    """Return whether the features that a model computes of an image depend on neither the task nor other images."""
    return can_predict_from_features(model.method) and not uses_batch_statistics(model.net)


def check_finite(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raise an `InputError` for weights that are NaN or infinite, and for buffers that are NaN.

    Buffers may be infinite, as attention masks are.

    >>> check_finite({"head.bias": torch.tensor([1.0, torch.nan])}, {})
    Traceback (most recent call last):
    metabridge.errors.InputError: the weight 'head.bias' contains NaN or infinite values: training diverged. Train \
again with a lower learning rate, or use an earlier checkpoint.
    """
    for name, value in (*params.items(), *buffers.items()):
        if value.isnan().any() or (name in params and value.isinf().any()):
            raise InputError(
                f"the weight {name!r} contains NaN or infinite values: training diverged. "
                "Train again with a lower learning rate, or use an earlier checkpoint."
            )


def _check_statistics(model: Model) -> None:
    """Raise an `InputError` if running statistics still have their initial values."""
    layers = running_batch_norms(model.net)
    if any(not layer.mean.any() and (layer.variance == 1).all() for layer in layers):
        raise InputError(
            "The network's running statistics still have their initial values, so it would not normalize its inputs. "
            "Call estimate_statistics(net, batches) with training images first, or use statistics='batch'."
        )


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """The features of all images of a split, and of randomly changed copies of the images, computed once."""

    features: Tensor  # (1 + copies, images, dimension)
    positions: Tensor  # for each image of the data set, its position in `features`; -1 for images of other splits

    @classmethod
    def of(
        cls,
        model: Model,
        environment: ImageTasks,
        augmentation: TestTimeAugmentation = NO_AUGMENTATION,
        *,
        seed: int = 0,
        progress: bool = False,
    ) -> FeatureTable:
        """Compute the features of all images of the environment's split; `seed` determines the changed copies."""
        check_channels(model.net, environment.data.images.shape[1:])
        image_indices, device = environment.image_indices, model.device
        positions = torch.full((len(environment.data.images),), -1)
        positions[image_indices] = torch.arange(len(image_indices))
        augment = augmentation.augment or Augment.for_size(environment.data.images.shape[-1])
        image_size = environment.data.images.shape[-1]
        batch_size = 64 if device.type == "cpu" else max(16, 1000 * 84**2 // image_size**2)

        def compute() -> Tensor:
            generator = torch.Generator(device).manual_seed(seed)
            # one list for the unchanged images and one for each copy of them, with the features of each batch
            features: list[list[Tensor]] = [[] for _ in range(1 + augmentation.copies)]
            for batch in track_progress(image_indices.split(batch_size), "features", progress):
                images = environment.data.float_images(batch).to(device)
                for copy, batch_features in enumerate(features):
                    inputs = images if copy == 0 else augment(images, generator)
                    batch_features.append(augmentation.features(model, inputs))
            return torch.stack([torch.cat(batch_features) for batch_features in features])

        if not caches_features(model.method, model.net):
            return cls(compute(), positions.to(device))
        key = (augmentation, seed if augmentation.copies else None, batch_size)
        all_images = environment.data.images
        images = (all_images[copy_to_device(batch, all_images.device)] for batch in image_indices.split(1000))
        features = cached_features(model.net, model.params, model.dtype, key, images, compute)
        return cls(features, positions.to(device))

    def evaluate(self, models: Sequence[Model], environment: ImageTasks, *, tasks: int, seed: int = 0) -> list[Score]:
        """Score models with these features and different heads on the tasks that `evaluate` samples with this seed."""
        generator = torch.Generator().manual_seed(seed)
        scorers = [Scorer() for _ in models]
        for size in _batch_sizes(tasks, 32 * BLOCK_SIZE):
            episodes = self.episodes(environment, size, generator)
            for scorer, model in zip(scorers, models):
                scorer.add(predict_from_features(model.method, model.params, episodes), episodes)
        return [scorer.score() for scorer in scorers]

    def predictions(
        self, model: Model, environment: ImageTasks, tasks: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Episodes]]:
        """Sample tasks, fit their heads in large batches, and yield the outputs together with the tasks."""
        for episodes in self.batches(environment, tasks, generator):
            check_test_time(model.method, model.net, model.params, episodes)
            yield predict_from_features(model.method, model.params, episodes), episodes

    def batches(self, environment: ImageTasks, tasks: int, generator: torch.Generator) -> Iterator[Episodes]:
        """Sample the same tasks as `episodes`, in batches that need little memory."""
        for size in _batch_sizes(tasks, 12 * BLOCK_SIZE):
            yield self.episodes(environment, size, generator)

    def episodes(self, environment: ImageTasks, tasks: int, generator: torch.Generator) -> Episodes:
        """Sample the same tasks as the environment, with features as inputs.

        The features of the changed copies of support images are added to the support sets.
        """
        blocks = [environment.sample_indices(size, generator) for size in _batch_sizes(tasks, BLOCK_SIZE)]
        indices = TaskIndices(*(torch.cat(tensors) for tensors in zip(*blocks)))
        episodes = indices.to_episodes(self.features_of)
        copies = [features[self._positions_of(indices.support.flatten(1))] for features in self.features[1:]]
        return replace(
            episodes,
            support_x=torch.cat([episodes.support_x, *copies], dim=1),
            support_y=episodes.support_y.repeat(1, len(self.features)),
        )

    def features_of(self, image_indices: Tensor) -> Tensor:
        """Return the features of unchanged images, (*image_indices.shape, dimension)."""
        return self.features[0, self._positions_of(image_indices)]

    def _positions_of(self, image_indices: Tensor) -> Tensor:
        return self.positions[copy_to_device(image_indices, self.positions.device)]


def _sample_in_blocks(
    environment: Environment, tasks: int, generator: torch.Generator, device: torch.device
) -> Episodes:
    """Sample tasks in blocks of `BLOCK_SIZE`, so a seed gives the same tasks for every batch size."""
    blocks = [environment.sample(size, generator).to(device) for size in _batch_sizes(tasks, BLOCK_SIZE)]
    return Episodes.concatenate(blocks)


def _batch_sizes(tasks: int, max_size: int) -> list[int]:
    """Return the sizes of the batches into which `tasks` tasks are split, each at most `max_size`."""
    return [min(max_size, tasks - start) for start in range(0, tasks, max_size)]


class Scorer:
    """Collects the scores of batches of tasks."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        self._diverged: list[Tensor] = []
        self._metric: Metric = "accuracy"

    def add(self, outputs: Tensor, episodes: Episodes) -> None:
        """Add the scores of tasks, given the outputs for their queries."""
        self._values.append(score_tasks(outputs, episodes))
        self._diverged.append((~outputs.isfinite()).flatten(1).any(1))
        self._metric = "accuracy" if episodes.is_classification else "squared error"

    def score(self) -> Score:
        """Return the mean score over all tasks."""
        return Score.of(torch.cat(self._values), self._metric, diverged=int(torch.cat(self._diverged).sum()))


def score_tasks(outputs: Tensor, episodes: Episodes) -> Tensor:
    """Return the accuracy of each task on its queries, or its mean squared error for regression.

    A query whose outputs are not finite counts as wrong; for regression, the squared error of its task is NaN.
    """
    if episodes.is_classification:
        return correct_predictions(outputs, episodes).double().mean(-1)
    return (outputs - episodes.query_y).masked_fill(~outputs.isfinite(), math.nan).square().sum(-1).mean(-1)


def correct_predictions(outputs: Tensor, episodes: Episodes) -> Tensor:
    """Return whether each query is predicted correctly, (tasks, queries); false if its outputs are not finite."""
    return outputs.isfinite().all(-1) & (outputs.argmax(-1) == episodes.query_y)
