"""Pictures of tasks: support images, query images and the predictions of a model."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.report.figures import LIGHT, Theme
from metabridge.training.evaluation import Model, score_tasks

CORRECT, WRONG = "#2a9d4a", "#e0352b"  # colors of frames
FRAME, GAP, TITLE = 3, 6, 18  # width of a frame, gap between images, and height of a task's title, in pixels
COLUMNS = 2  # number of tasks side by side
PIXELS_PER_INCH = 84


def picture(model: Model, episodes: Episodes, *, queries_per_class: int = 2, theme: Theme = LIGHT) -> Figure:
    """Draw each task with one column per class: its first support image, and below it its first query images.

    The color of a query's frame shows whether the prediction is correct. The small image below a query is the support
    image of the predicted class.

    Args:
        model: The model that predicts.
        episodes: The tasks.
        queries_per_class: Number of query images per class to show.
        theme: Colors of the figure.
    """
    with torch.no_grad():
        outputs = model.predict(episodes.to(model.params["head.weight"].device)).cpu()
    episodes = episodes.to("cpu")
    predicted_labels = outputs.argmax(-1)
    blocks = [_block(episodes[task], predicted_labels[task], queries_per_class, theme) for task in range(len(episodes))]
    height, width = blocks[0].shape[:2]
    corners = [(height * (task // COLUMNS), width * (task % COLUMNS)) for task in range(len(blocks))]
    canvas = _blank(corners[-1][0] + height, width * min(COLUMNS, len(blocks)), theme.background)
    with theme.context():
        figure = Figure(figsize=(canvas.shape[1] / PIXELS_PER_INCH, canvas.shape[0] / PIXELS_PER_INCH))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        accuracies = score_tasks(outputs, episodes).tolist()
        for task, ((top, left), block) in enumerate(zip(corners, blocks)):
            canvas[top : top + height, left : left + width] = block
            axes.text(left, top + TITLE - 6, f"task {task + 1}: {100 * accuracies[task]:.0f} % correct", fontsize=8)
        axes.imshow(canvas, interpolation="nearest")
    return figure


def _block(task: Episodes, predicted_labels: Tensor, queries_per_class: int, theme: Theme) -> NDArray[np.float64]:
    """Return the picture of one task, (height, width, 3), with space for the title and margins."""
    support_labels, query_labels = task.support_y[0], task.query_y[0]
    queries = _dark_on_light(task.query_x[0])
    classes = range(int(support_labels.max()) + 1)
    support = [_dark_on_light(task.support_x[0, support_labels == label])[0] for label in classes]
    columns = []
    for label, example in enumerate(support):
        cells = [_framed(example, theme.grid, theme), _blank(GAP, example.shape[1] + 2 * FRAME + GAP, theme.background)]
        for index in (query_labels == label).nonzero().flatten()[:queries_per_class].tolist():
            predicted_label = int(predicted_labels[index])
            cells.append(_framed(queries[index], CORRECT if predicted_label == label else WRONG, theme))
            cells.append(_half_size(support[predicted_label], theme))
        columns.append(np.concatenate(cells))
    images = np.concatenate(columns, axis=1)
    block = _blank(images.shape[0] + TITLE + GAP, images.shape[1] + 3 * GAP, theme.background)
    block[TITLE : TITLE + images.shape[0], : images.shape[1]] = images
    return block


def _dark_on_light(images: Tensor) -> NDArray[np.float64]:
    """Return images (n, channels, h, w) as (n, h, w, 3). Images with one channel are inverted, so that ink is dark."""
    channels_last = images.double().clamp(0, 1).permute(0, 2, 3, 1)
    return (1 - channels_last.expand(-1, -1, -1, 3) if channels_last.shape[-1] == 1 else channels_last).numpy()


def _blank(height: int, width: int, color: str) -> NDArray[np.float64]:
    return np.full((height, width, 3), to_rgb(color))


def _framed(image: NDArray[np.float64], color: str, theme: Theme) -> NDArray[np.float64]:
    """Return an image in a frame, with a gap to its right."""
    height, width = image.shape[:2]
    cell = _blank(height + 2 * FRAME, width + 2 * FRAME + GAP, theme.background)
    cell[:, :-GAP] = to_rgb(color)
    cell[FRAME : FRAME + height, FRAME : FRAME + width] = image
    return cell


def _half_size(image: NDArray[np.float64], theme: Theme) -> NDArray[np.float64]:
    """Return an image at half its size, centered in a cell as wide as a framed image."""
    height, width = image.shape[0] // 2, image.shape[1] // 2
    # Averaging blocks of 2×2 pixels keeps thin strokes; taking every second pixel would lose them.
    halved = image[: 2 * height, : 2 * width].reshape(height, 2, width, 2, 3).mean((1, 3))
    cell = _blank(height + 2 * GAP, image.shape[1] + 2 * FRAME + GAP, theme.background)
    left = (cell.shape[1] - GAP - width) // 2
    cell[GAP // 2 : GAP // 2 + height, left : left + width] = halved
    return cell
