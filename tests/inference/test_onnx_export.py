from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import metabridge as mb
from metabridge import FewShotClassifier, InputError
from metabridge.inference import export_onnx, write_head
from metabridge.inference.image_input import convert_images

try:
    import onnx  # noqa: F401
    import onnxruntime
    import onnxscript  # noqa: F401
except ModuleNotFoundError as error:
    onnxruntime = None
    reason = f"{error.name} is not installed"
else:
    reason = ""

with_onnx = pytest.mark.skipif(onnxruntime is None, reason=reason)


def onnx_features(file, images: np.ndarray) -> np.ndarray:
    return onnxruntime.InferenceSession(file).run(None, {"images": images})[0]


@with_onnx
@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_features_in_onnx_are_those_of_torch_for_any_number_of_images(tmp_path, statistics):
    anil, net = mb.method("anil"), mb.models.conv4(3, 32, filters=8, statistics=statistics).eval()
    mb.models.estimate_statistics(net.features, [torch.rand(20, 3, 32, 32)])
    params = {name: value + 0.1 * torch.randn_like(value) for name, value in mb.parameters(anil, net).items()}
    model = mb.Model(anil, net, params)  # the parameters of `net` itself differ
    assert export_onnx(model, tmp_path / "new" / "features.onnx") < 1e-4
    for count in (1, 9):
        images = torch.rand(count, 3, 32, 32)
        exported = onnx_features(tmp_path / "new" / "features.onnx", images.numpy())
        np.testing.assert_allclose(exported, model.features(images), atol=1e-4)


@with_onnx
def test_onnx_model_and_head_reproduce_predictions_without_torch(run, support, query, tmp_path):
    classifier = FewShotClassifier(run).fit(*support)
    export_onnx(classifier.adapted_, tmp_path / "features.onnx")
    head = json.loads(write_head(classifier, tmp_path / "head.json").read_text())
    images = convert_images(query[0], classifier.decode_options_).astype(np.float32) / 255
    features = onnx_features(tmp_path / "features.onnx", images)
    assert head["kind"] == "linear"
    assert head["normalize"]
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    scores = features @ np.array(head["weight"]).T + np.array(head["bias"])
    np.testing.assert_allclose(scores, classifier.decision_function(query[0]), atol=1e-4)
    assert [head["classes"][index] for index in scores.argmax(1)] == classifier.predict(query[0]).tolist()


@with_onnx
def test_an_onnx_model_that_differs_is_not_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.inference.onnx_export._difference_from_pytorch", lambda *_: (0.5, 20.0))
    with pytest.raises(InputError, match=r"by up to 0.5, but at most 0.002 is allowed, so .* is not written"):
        export_onnx(mb.load(run), tmp_path / "features.onnx")
    assert not list(tmp_path.iterdir())


def test_pairwise_heads_and_heads_adapted_by_gradient_descent_are_written(run, anil, support, tmp_path):
    model = mb.load(run)
    model = replace(model, method=replace(model.method, test_solver=mb.heads.SVM(loss="hinge")))
    head = json.loads(write_head(FewShotClassifier(model).fit(*support), tmp_path / "pairs.json").read_text())
    assert head["kind"] == "pairwise"
    assert len(head["weight"]) == len(head["bias"]) == 6  # pairs of four classes
    classifier = FewShotClassifier(anil).fit(*support)
    head = json.loads(write_head(classifier, tmp_path / "linear.json").read_text())
    assert head["kind"] == "linear"
    assert not head["normalize"]
    np.testing.assert_array_equal(np.float32(head["weight"]), classifier.adapted_.params["head.weight"])


def test_the_error_names_the_install_command_if_onnx_is_not_installed(run, tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.inference.onnx_export.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs onnx, which is not installed. Run pip install 'metabridge\[onnx\]'"):
        export_onnx(mb.load(run), tmp_path / "features.onnx")


@pytest.mark.parametrize("kind", ["closed form", "pairwise", "gradient descent"])
def test_a_written_head_predicts_like_the_classifier(run, anil, support, query, tmp_path, kind):
    model = mb.load(anil if kind == "gradient descent" else run)
    if kind == "pairwise":
        model = replace(model, method=replace(model.method, test_solver=mb.heads.SVM(loss="hinge")))
    if kind == "gradient descent":
        bias = model.params["head.bias"] + torch.tensor([3.0, -2.0, 1.0, 0.0])
        model = replace(model, params=model.params | {"head.bias": bias})
    classifier = FewShotClassifier(model).fit(*support)
    head = json.loads(write_head(classifier, tmp_path / "head.json").read_text())
    x = torch.from_numpy(convert_images(query[0], classifier.decode_options_)).float() / 255
    adapted = classifier.adapted_
    features = mb.Model(model.method, adapted.net, adapted.params).features(x)
    if head["normalize"]:
        features = features / features.norm(dim=1, keepdim=True)
    decisions = features @ torch.tensor(head["weight"]).T + torch.tensor(head["bias"])
    assert (features @ torch.tensor(head["weight"]).T - decisions).abs().max() > 1e-2  # the bias has an effect
    if kind == "pairwise":
        votes = torch.zeros(len(x), 4)
        for column, (first, second) in enumerate((a, b) for a in range(4) for b in range(a + 1, 4)):
            votes[:, first] += decisions[:, column] > 0
            votes[:, second] += decisions[:, column] <= 0
        torch.testing.assert_close(adapted(x).round(), votes)
    else:
        torch.testing.assert_close(adapted(x), decisions, atol=1e-4, rtol=1e-4)


def test_weights_that_are_not_finite_are_not_exported(run, support, tmp_path):
    model, classifier = mb.load(run), FewShotClassifier(run).fit(*support)
    model.params["features.0.0.weight"][0] = torch.inf
    with pytest.raises(InputError, match=r"the weight 'features.0.0.weight' contains NaN or infinite values"):
        export_onnx(model, tmp_path / "features.onnx")
    classifier.adapted_.head.bias[0, 1] = torch.nan
    with pytest.raises(InputError, match=r"the weight 'head.bias' contains NaN"):
        write_head(classifier, tmp_path / "head.json")
    assert not list(tmp_path.iterdir())
