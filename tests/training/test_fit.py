from __future__ import annotations

import pytest
import torch

from metabridge import InputError, Sinusoid, evaluate, fit, method, parameters
from metabridge.models import conv4, mlp
from metabridge.training import Model


@pytest.fixture(scope="module")
def tasks(glyphs):
    return {
        split: glyphs.tasks(split, queries=5, superclass="different" if split == "test" else "any")
        for split in ("train", "validation", "test")
    }


def test_training_on_sinusoids_beats_the_untrained_net():
    chosen, net = method("maml", steps=3, lr=0.02), mlp(1, 1)
    before = evaluate(Model(chosen, net, parameters(chosen, net)), Sinusoid(), tasks=100)
    run = fit(net, chosen, Sinusoid(), iterations=150, tasks=8, lr=5e-3, progress=False)
    after = evaluate(run, Sinusoid(), tasks=100)
    assert after.metric == "squared error"
    assert after.beats(before)
    assert after.mean + after.ci95 < before.mean - before.ci95


@pytest.mark.parametrize(
    ("name", "iterations", "batch", "options"),
    [("anil", 60, 4, {"lr": 0.1}), ("r2d2", 40, 4, {}), ("rfs", 100, 16, {})],
)
def test_training_on_glyphs_beats_the_untrained_net(tasks, name, iterations, batch, options):
    chosen, net = method(name, **options), conv4(1, 28)
    untrained = Model(chosen, net, parameters(chosen, net, classes=tasks["train"].classes))
    before = evaluate(untrained, tasks["test"], tasks=100)
    run = fit(net, chosen, tasks["train"], iterations=iterations, tasks=batch, lr=3e-3, progress=False)
    after = evaluate(run, tasks["test"], tasks=100)
    assert after.mean - after.ci95 > before.mean + before.ci95


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    def weights(seed):
        run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=5, seed=seed, progress=False, mode="loop")
        return run.params["head.weight"]

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


def test_the_parameters_of_the_best_validation_are_kept_and_written_into_the_network():
    """A rate so large that training only harms: the first validation is then the best."""
    net = mlp(1, 1)
    run = fit(
        net,
        method("maml", steps=1, lr=1e-3),
        Sinusoid(),
        validate=Sinusoid(),
        iterations=20,
        lr=3.0,
        validate_every=1,
        validate_tasks=50,
        progress=False,
    )
    scores = [point.score.mean for point in run.curve]
    assert scores.index(min(scores)) < len(scores) - 1
    assert evaluate(run, Sinusoid(), tasks=50).mean == pytest.approx(min(scores), rel=1e-5)
    assert all(torch.equal(value, run.params[name]) for name, value in net.named_parameters())


def test_running_statistics_are_estimated_before_evaluation(tasks):
    net = conv4(1, 28, statistics="running")
    chosen = method("r2d2")
    with pytest.raises(InputError, match="were never estimated"):
        evaluate(Model(chosen, net, parameters(chosen, net)), tasks["test"], tasks=2)
    run = fit(net, chosen, tasks["train"], iterations=20, tasks=2, progress=False)
    assert evaluate(run, tasks["test"], tasks=50).mean > 0.4
    episodes = tasks["test"].sample(1, torch.Generator().manual_seed(0))
    alone = run.predict(episodes)[0, :1]
    fewer = type(episodes)(episodes.support_x, episodes.support_y, episodes.query_x[:, :1], episodes.query_y[:, :1])
    assert torch.allclose(run.predict(fewer)[0], alone, atol=1e-4)  # inductive: a query by itself


def test_a_loss_that_is_not_finite_ends_training_with_a_sentence():
    with pytest.raises(InputError, match=r"The loss became (nan|inf) at iteration \d+. Lower lr \(now 1e\+20\)"):
        fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=20, lr=1e20, progress=False)


def test_impossible_counts_are_refused():
    with pytest.raises(InputError, match="iterations is 0"):
        fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=0)
    run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=1, progress=False)
    with pytest.raises(InputError, match="an interval needs at least 2"):
        evaluate(run, Sinusoid(), tasks=1)
