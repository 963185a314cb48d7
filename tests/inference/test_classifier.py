from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import metabridge as mb
from metabridge import FewShotClassifier, InputError
from metabridge.heads import SVM, Head
from metabridge.inference.onnx_export import export_onnx, write_head
from metabridge.training import evaluate
from metabridge.training.checkpoint import RunFolder

HEADS = list(Head.registry)


@pytest.fixture
def fitted_classifier(run, support):
    return FewShotClassifier(run).fit(*support)


@pytest.mark.parametrize("head", [None, *HEADS])
def test_new_characters_are_classified_from_files(run, support, query, head):
    classifier = FewShotClassifier(run, head=head).fit(*support)
    assert classifier.score(*query) > 0.7
    assert set(classifier.predict(query[0])) <= set(support[1])


def test_paths_pillow_images_and_arrays_give_equal_predictions(run, support, query):
    def as_all_input_types(files):
        pillow_images = [Image.open(file) for file in files]
        arrays = [np.asarray(image) for image in pillow_images]
        stack = np.stack(arrays)
        floats = stack / 255
        colors = [np.repeat(array[..., None], 3, axis=2) for array in arrays]
        texts = [str(file) for file in files]
        return [files, texts, np.array(texts), pillow_images, arrays, stack, stack[..., None], floats, colors]

    expected = FewShotClassifier(run).fit(*support).predict_proba(query[0])
    for images, queries in zip(as_all_input_types(support[0]), as_all_input_types(query[0])):
        np.testing.assert_array_equal(FewShotClassifier(run).fit(images, support[1]).predict_proba(queries), expected)


def test_predictions_with_the_penalty_of_the_run_equal_those_of_metabridge_adapt(run, support, query):
    model = mb.load(run)
    x, queries = (
        torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files])[:, None]).float() / 255
        for files, _ in (support, query)
    )
    labels = torch.from_numpy(np.unique(support[1], return_inverse=True)[1])
    outputs = mb.adapt(model.method, model.net, model.params, x, labels)(queries)
    classifier = FewShotClassifier(run, penalty=0.33).fit(*support)
    np.testing.assert_allclose(classifier.decision_function(query[0]), outputs, atol=1e-5)


def test_probabilities_sum_to_one_in_the_order_of_the_classes(fitted_classifier, support, query):
    probabilities = fitted_classifier.predict_proba(query[0])
    assert fitted_classifier.classes_.tolist() == sorted(set(support[1]))
    assert probabilities.shape == (len(query[0]), len(fitted_classifier.classes_))
    np.testing.assert_allclose(probabilities.sum(1), 1)
    predictions = fitted_classifier.classes_[probabilities.argmax(1)]
    np.testing.assert_array_equal(predictions, fitted_classifier.predict(query[0]))


def test_labels_may_be_numbers(run, support, query):
    numbers = {name: 10 * index - 7 for index, name in enumerate(sorted(set(support[1])))}
    classifier = FewShotClassifier(run).fit(support[0], [numbers[name] for name in support[1]])
    by_name = FewShotClassifier(run).fit(*support).predict(query[0])
    assert classifier.predict(query[0]).tolist() == [numbers[name] for name in by_name]


def test_a_positive_decision_between_two_classes_predicts_the_second(run, support, query):
    pairs = [(file, label) for file, label in zip(*support) if label in ("character 0", "character 1")]
    files, labels = zip(*pairs)
    classifier = FewShotClassifier(run).fit(files, labels)
    decisions = classifier.decision_function(query[0])
    assert decisions.shape == (len(query[0]),)
    np.testing.assert_array_equal(classifier.classes_[(decisions > 0).astype(int)], classifier.predict(query[0]))


def test_images_are_predicted_independently_with_running_statistics(fitted_classifier, query, monkeypatch):
    in_one_call = fitted_classifier.predict_proba(query[0])
    in_single_calls = np.concatenate([fitted_classifier.predict_proba([file]) for file in query[0]])
    monkeypatch.setattr("metabridge.inference.support_adaptation.CHUNK_SIZE", 5)
    np.testing.assert_allclose(in_single_calls, in_one_call, atol=1e-5)
    np.testing.assert_allclose(fitted_classifier.predict_proba(query[0]), in_one_call, atol=1e-5)


def test_batch_statistics_predict_images_together_with_a_warning(anil, support, query):
    classifier = FewShotClassifier(anil).fit(*support)
    with pytest.warns(UserWarning, match="depends on the other images of the call"):
        probabilities = classifier.predict_proba(query[0])
    assert (classifier.classes_[probabilities.argmax(1)] == query[1]).mean() > 0.5
    with pytest.warns(UserWarning, match="a single image is normalized with its own statistics"):
        probabilities_of_single_image = classifier.predict_proba(query[0][:1])
    assert not np.allclose(probabilities_of_single_image, probabilities[:1], atol=1e-3)


def test_batch_statistics_never_split_a_call_into_chunks(anil, support, query, monkeypatch):
    classifier = FewShotClassifier(anil).fit(*support)
    with pytest.warns(UserWarning, match="depends on the other images of the call"):
        with_large_chunks = classifier.decision_function(query[0])
    monkeypatch.setattr("metabridge.inference.support_adaptation.CHUNK_SIZE", 5)
    with pytest.warns(UserWarning, match="depends on the other images of the call"):
        with_small_chunks = classifier.decision_function(query[0])
    np.testing.assert_array_equal(with_small_chunks, with_large_chunks)


def test_images_are_converted_to_the_size_and_mode_of_the_training_images(fitted_classifier, query, tmp_path):
    file = tmp_path / "large.png"
    Image.open(query[0][0]).resize((140, 140), Image.Resampling.NEAREST).convert("RGB").save(file)
    expected = fitted_classifier.predict_proba(query[0][:1])
    np.testing.assert_allclose(fitted_classifier.predict_proba([file]), expected, atol=0.1)


def test_dark_ink_is_inverted_for_a_run_that_was_trained_on_inverted_images(run, support, query):
    model = mb.load(run)
    settings = model.settings | {"tasks": {"data": {"name": "omniglot:data/omniglot"}}}
    classifier = FewShotClassifier(replace(model, settings=settings))
    inverted = [[255 - np.asarray(Image.open(file)) for file in files] for files in (support[0], query[0])]
    expected = FewShotClassifier(run).fit(*support).predict_proba(query[0])
    np.testing.assert_array_equal(classifier.fit(inverted[0], support[1]).predict_proba(inverted[1]), expected)


def test_a_classifier_is_a_scikit_learn_estimator(run, support, query):
    classifier = FewShotClassifier(run, head="ridge")
    assert classifier.get_params() == {
        "model": run,
        "head": "ridge",
        "penalty": None,
        "reject": None,
        "weights": None,
        "device": "auto",
    }
    assert clone(classifier).get_params() == classifier.get_params()
    assert is_classifier(classifier)
    classifier.set_params(head="centroid").fit(*support)
    assert clone(classifier).head == "centroid"
    with pytest.raises(NotFittedError):
        clone(classifier).predict(query[0])
    unpickled = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(unpickled.predict(query[0]), classifier.predict(query[0]))


def test_a_classifier_can_be_cross_validated_and_used_in_a_pipeline(run, query):
    arrays = np.stack([np.asarray(Image.open(file)) for file in query[0]])
    assert cross_val_score(FewShotClassifier(run), *query, cv=3).mean() > 0.7
    pipeline = make_pipeline(FunctionTransformer(lambda images: 255 - images), FewShotClassifier(run))
    assert cross_val_score(pipeline, 255 - arrays, query[1], cv=3).mean() > 0.7


def test_a_run_is_not_changed_by_fitting(run, support, query, fitted_classifier):
    model = mb.load(run)
    model.net.train()
    classifier = FewShotClassifier(model).fit(*support)
    np.testing.assert_array_equal(classifier.predict_proba(query[0]), fitted_classifier.predict_proba(query[0]))
    assert model.net.training
    assert clone(classifier).fit(*support).score(*query) == fitted_classifier.score(*query)


@pytest.mark.parametrize("head", [None, "svm"])
def test_a_saved_model_predicts_the_same_without_its_run(run, support, query, tmp_path, head):
    model = mb.load(run)
    classifier = FewShotClassifier(model, head=head).fit(*support)
    classifier.save(tmp_path / "adapted")
    loaded = FewShotClassifier.load(tmp_path / "adapted")
    np.testing.assert_array_equal(loaded.predict_proba(query[0]), classifier.predict_proba(query[0]))
    assert loaded.classes_.tolist() == classifier.classes_.tolist()
    with pytest.raises(InputError, match="saved without its model"):
        loaded.fit(*support)


def test_a_saved_model_keeps_adapted_features_and_pairwise_heads(run, anil, support, query, tmp_path):
    svm_model, maml_model = mb.load(run), mb.load(anil)
    svm_model = replace(svm_model, method=replace(svm_model.method, test_solver=SVM(loss="hinge")))
    maml_model = replace(maml_model, method=mb.method("maml", steps=2, lr=0.1))
    for number, model in enumerate((svm_model, maml_model)):
        classifier = FewShotClassifier(model).fit(*support)
        classifier.save(tmp_path / str(number))
        loaded = FewShotClassifier.load(tmp_path / str(number))
        assert type(loaded.adapted_.head) is type(classifier.adapted_.head)
        images = torch.rand(5, 1, 28, 28)
        torch.testing.assert_close(loaded.adapted_(images), classifier.adapted_(images))


def test_a_saved_model_can_be_fitted_again_from_its_run(fitted_classifier, support, query, tmp_path):
    fitted_classifier.set_params(head="ridge").fit(*support).save(tmp_path)
    loaded = FewShotClassifier.load(tmp_path)
    assert loaded.fit(*support).score(*query) == fitted_classifier.score(*query)
    assert loaded.head == "ridge"


def test_accuracy_with_the_penalty_of_the_run_equals_that_of_evaluate(run, glyphs):
    model, tasks = mb.load(run), glyphs.tasks("test", ways=5, shots=5, queries=5)
    episodes = tasks.sample(16, torch.Generator().manual_seed(0))
    scores = []
    for task in range(16):
        x, queries = (
            (255 * images[task, :, 0]).round().byte().numpy() for images in (episodes.support_x, episodes.query_x)
        )
        classifier = FewShotClassifier(model, penalty=0.33).fit(x, episodes.support_y[task].numpy())
        scores.append(classifier.score(queries, episodes.query_y[task].numpy()))
    np.testing.assert_allclose(scores, evaluate(model, tasks, tasks=16).values)


def test_a_trained_head_needs_as_many_classes_as_in_training_and_a_fitted_head_any_number(anil, support, query):
    pairs = [(file, label) for file, label in zip(*support) if label != "character 0"]
    files, labels = zip(*pairs)
    with pytest.raises(InputError, match=r"y has 3 classes, but .* trained for 4.*--ways 3, or use head='logistic'"):
        FewShotClassifier(anil).fit(files, labels)
    assert len(FewShotClassifier(anil, head="logistic").fit(files, labels).classes_) == 3


@pytest.mark.parametrize(
    ("X", "message"),
    [
        ("nowhere.png", r"nowhere.png cannot be read \(No such file or directory\)"),
        ([], "X is empty"),
        (["nowhere.png"], r"nowhere.png cannot be read \(No such file or directory\). Fix or remove it."),
        ([__file__], r"test_classifier.py cannot be read \(it is not an image that Pillow reads\)"),
        ([np.zeros(784)], r"X\[0\] has shape \(784,\), but must have shape"),
        (b"image.png", "X has type bytes, but must be a list of images or a single image"),
        (np.zeros((3, 1, 28, 28)), r"X\[0\] has shape \(1, 28, 28\), but must have shape"),
        (
            np.full((1, 28, 28), 255.0),
            r"X\[0\] has values from 255 to 255, but floating-point values must be from 0 to 1",
        ),
        (np.full((1, 28, 28), np.nan), "floating-point values must be from 0 to 1"),
        (np.zeros((1, 28, 28), dtype=int), r"X\[0\] has dtype int64, but must be uint8, or floating point"),
        ([3], r"X\[0\] has type int, but must be the path of an image"),
        (3, "X has type int, but must be a list of images or a single image"),
        (np.array(3), "X has type ndarray, but must be a list of images"),
        (torch.zeros(2, 3, 2, 28, 28), r"X has shape \(2, 3, 2, 28, 28\), but a tensor must have shape \(n, channels"),
        (torch.zeros(2, 5, 28, 28), r"X\[0\] has shape \(5, 28, 28\), but a tensor must have shape"),
        (torch.zeros(2, 28, 28).int(), r"X\[0\] has dtype int32, but must be uint8, or floating point"),
    ],
)
def test_an_input_that_is_not_an_image_is_an_error_that_names_it(fitted_classifier, X, message):
    with pytest.raises(InputError, match=message):
        fitted_classifier.predict(X)


def test_wrong_labels_are_rejected(run, support):
    files, labels = support
    with pytest.raises(InputError, match="y has 1 class"):
        FewShotClassifier(run).fit(files[:2], ["one", "one"])
    # there are 20 support images: 5 images of each of 4 classes
    with pytest.raises(InputError, match=r"X has 19 images, but y has 20 labels"):
        FewShotClassifier(run).fit(files[1:], labels)
    with pytest.raises(InputError, match="head is 'forest'"):
        FewShotClassifier(run, head="forest").fit(files, labels)
    with pytest.raises(InputError, match="model is nowhere, which is neither a folder nor the name of a model"):
        FewShotClassifier("nowhere").fit(files, labels)


def test_a_network_without_image_inputs_is_rejected(support):
    anil, net = mb.method("anil"), mb.models.mlp(7, 4)
    with pytest.raises(InputError, match="does not contain the size of its input images"):
        FewShotClassifier(mb.Model(anil, net, mb.parameters(anil, net))).fit(*support)


def test_folders_without_an_adapted_model_and_damaged_files_are_rejected(fitted_classifier, tmp_path):
    with pytest.raises(InputError, match="contains no adapted model"):
        FewShotClassifier.load(tmp_path)
    fitted_classifier.save(tmp_path).write_bytes(b"damaged")
    with pytest.raises(InputError, match="is damaged"):
        FewShotClassifier.load(tmp_path)


def test_metabridge_is_imported_without_scikit_learn():
    code = "import sys, metabridge; assert 'sklearn' not in sys.modules; assert metabridge.FewShotClassifier"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["r2d2", "metaoptnet"])
def test_a_closed_form_head_without_a_bias_is_saved_and_exported(support, query, tmp_path, name):
    net = mb.models.conv4(1, 28, outputs=len(set(support[1])), filters=4, statistics="running")
    method = mb.method(name)
    params = mb.parameters(method, net)
    with torch.no_grad():
        params["head.bias"] += 100.0  # a closed-form head ignores it
    classifier = FewShotClassifier(mb.Model(method, net, params)).fit(*support)
    classifier.save(tmp_path)
    loaded = FewShotClassifier.load(tmp_path)
    np.testing.assert_allclose(loaded.decision_function(query[0]), classifier.decision_function(query[0]), atol=1e-6)
    assert abs(classifier.decision_function(query[0])).max() < 50
    if find_spec("onnxscript") is not None:
        export_onnx(classifier.adapted_, tmp_path / "features.onnx")


def test_an_unfitted_head_is_not_written(run, tmp_path):
    with pytest.raises(NotFittedError):
        write_head(FewShotClassifier(run), tmp_path / "head.json")


@pytest.mark.parametrize("name", ["features.0.0.weight", "head.bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_run_that_diverged_is_not_adapted(run, support, name, value):
    model = mb.load(run)
    model.params[name].view(-1)[-1] = value
    with pytest.raises(InputError, match=f"the weight '{name}' contains NaN or infinite values: training diverged"):
        FewShotClassifier(model).fit(*support)


def test_adaptation_that_diverges_is_an_error(anil, support):
    model = mb.load(anil)
    model = replace(model, method=mb.method("maml", steps=9, lr=1e30))
    with pytest.raises(InputError, match="adaptation to these images diverged"):
        FewShotClassifier(model).fit(*support)


def test_outputs_that_are_not_finite_are_an_error(fitted_classifier, query, tmp_path):
    fitted_classifier.adapted_.head.weight.fill_(3e38)
    for predict in (fitted_classifier.predict, fitted_classifier.predict_proba, fitted_classifier.decision_function):
        with pytest.raises(InputError, match="the outputs for these images are NaN or infinite"):
            predict(query[0])
    fitted_classifier.save(tmp_path)
    with pytest.raises(InputError, match="the outputs for these images are NaN or infinite"):
        FewShotClassifier.load(tmp_path).predict(query[0])


def test_an_unknown_device_is_an_error_that_names_it(run, support, fitted_classifier, tmp_path):
    fitted_classifier.save(tmp_path)
    with pytest.raises(InputError, match=r"device is 'gpu', but must be a PyTorch device\. Use device='cuda'"):
        FewShotClassifier(run, device="gpu").fit(*support)
    with pytest.raises(InputError, match=r"device is 'gpu', but must be a PyTorch device\. Use device='cuda'"):
        FewShotClassifier.load(tmp_path, device="gpu")


def test_labels_may_be_numpy_numbers(run, support, query, tmp_path):
    numbers = [np.int16(label[-1]) for label in support[1]]
    classifier = FewShotClassifier(run).fit(support[0], numbers)
    classifier.save(tmp_path)
    expected = [int(name[-1]) for name in FewShotClassifier(run).fit(*support).predict(query[0])]
    assert FewShotClassifier.load(tmp_path).predict(query[0]).tolist() == expected


def rewrite(folder, change_metadata=lambda metadata: None, change_tensors=lambda tensors: None) -> None:
    """Change the metadata and tensors of a saved model and write it with a valid checksum."""
    run_folder = RunFolder(folder)
    tensors, metadata = run_folder.read("adapted")
    change_metadata(metadata)
    change_tensors(tensors)
    run_folder.write("adapted", tensors, metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.pop("model"),
        lambda metadata: metadata["model"].update(filters=10**9),
        lambda metadata: metadata["model"].update(filters=9),
        lambda metadata: metadata["model"].update(model=7),
        lambda metadata: metadata["form"].update(size=10**9),
        lambda metadata: metadata["form"].update(channels=3),
        lambda metadata: metadata.update(form=None),
        lambda metadata: metadata.update(classes="abcd"),
        lambda metadata: metadata.update(classes=[["a"], ["b"], ["c"], ["d"]]),
        lambda metadata: metadata["classes"].pop(),
        lambda metadata: metadata["head"].update(kind="PairwiseHead"),
        lambda metadata: metadata["head"].pop("kind"),
        lambda metadata: metadata.update(head=None, classes=["a", "b"]),
        lambda metadata: metadata.update(arguments={"rum": 1}),
        lambda metadata: metadata["arguments"].update(reject="often"),
        lambda metadata: metadata.pop("temperature"),
        lambda metadata: metadata.update(temperature=0),
        lambda metadata: metadata.update(temperature=float("nan")),
        lambda metadata: metadata.update(penalty="large"),
        lambda metadata: metadata["support"].pop(),
        lambda metadata: metadata.update(support=[3] * 20),
        lambda metadata: metadata.update(support="x" * 20),
        lambda metadata: metadata["methods"].pop(),
        lambda metadata: metadata["methods"][0].pop("adapts"),
        lambda metadata: metadata["methods"][1]["test"].update(solver="forest"),
    ],
)
def test_a_saved_model_with_invalid_metadata_is_damaged(fitted_classifier, tmp_path, change):
    fitted_classifier.save(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(InputError, match=r"adapted.safetensors is damaged: .*[^.]\. Restore it from a copy"):
        FewShotClassifier.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("head.bias", torch.zeros(1, 3), "its head has the wrong shape or dtype"),
        ("head.weight", torch.zeros(1, 4, 1, dtype=torch.float64), "its head has the wrong shape or dtype"),
        ("params.features.0.0.weight", torch.zeros(2), "the network has 'features.0.0.weight' of shape"),
        ("head.bias", torch.full((1, 4), torch.nan), "the weight 'bias' contains NaN or infinite values"),
        ("support.features", torch.zeros(20, 3), "an array of its support set has the wrong shape or dtype"),
        ("support.features", torch.full((20, 32), torch.nan), "an array of its support set .* is not finite"),
        ("support.digests", torch.zeros(20), "an array of its support set has the wrong shape or dtype"),
        ("support.classes", torch.zeros(20).long(), "its support set does not have 4 classes"),
        ("support.images", torch.zeros(20, 1, 9, 9).byte(), "an array of its support set has the wrong shape or dtype"),
        ("initial.head.bias", torch.zeros(9), "the network has 'head.bias' of shape"),
    ],
)
def test_a_saved_model_with_invalid_tensors_is_rejected(fitted_classifier, tmp_path, name, value, message):
    fitted_classifier.save(tmp_path)
    rewrite(tmp_path, change_tensors=lambda tensors: tensors.update({name: value}))
    with pytest.raises(InputError, match=message):
        FewShotClassifier.load(tmp_path)
