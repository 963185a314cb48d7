from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from metabridge.inference import FewShotClassifier
from metabridge.learners import PRESETS, method, parameters
from metabridge.models import conv4
from metabridge.training import Model

WAYS, THREADS = 3, 8


@pytest.mark.parametrize("name", PRESETS)
def test_a_finished_prediction_does_not_change_predictions_in_other_threads(name):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (2 * WAYS, 16, 16), dtype=np.uint8)
    net = conv4(1, 16, WAYS, filters=4, statistics="running").eval()
    preset = method(name)
    other_net = conv4(1, 16, WAYS, filters=4, statistics="running", seed=1)
    params = parameters(preset, other_net, classes=WAYS)  # they differ from the parameters of `net` itself
    classifier = FewShotClassifier(Model(preset, net, params)).fit(images, [0, 0, 1, 1, 2, 2])
    expected = classifier.predict_proba(images)
    waiting_threads, prediction_finished = threading.Semaphore(0), threading.Event()

    def wait_in_the_forward_pass(*_: object) -> None:
        if threading.current_thread().name != "predict_while_others_wait":
            waiting_threads.release()
            assert prediction_finished.wait(timeout=60)

    classifier.adapted_.net.features[0].register_forward_pre_hook(wait_in_the_forward_pass)

    def predict_while_others_wait() -> None:
        for _ in range(THREADS - 1):
            waiting_threads.acquire(timeout=60)
        results.append(classifier.predict_proba(images))
        prediction_finished.set()

    results: list[np.ndarray] = []
    with ThreadPoolExecutor(THREADS - 1) as pool:
        futures = [pool.submit(classifier.predict_proba, images) for _ in range(THREADS - 1)]
        thread = threading.Thread(target=predict_while_others_wait, name="predict_while_others_wait")
        thread.start()
        thread.join()
        results += [future.result() for future in futures]
    for result in results:
        np.testing.assert_array_equal(result, expected)
