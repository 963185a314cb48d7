from __future__ import annotations

import pytest
import torch

from metabridge import Score, Sinusoid, evaluate, method, parameters
from metabridge.models import mlp
from metabridge.training import Model


def test_the_interval_covers_the_truth_about_nineteen_times_in_twenty():
    generator = torch.Generator().manual_seed(0)
    covered = [
        abs(score.mean - 0.3) < score.ci95
        for score in (Score.of((torch.rand(200, generator=generator) < 0.3).double()) for _ in range(1000))
    ]
    assert sum(covered) / 1000 == pytest.approx(0.95, abs=0.025)


def test_the_same_seed_judges_every_model_on_the_same_tasks():
    chosen, net = method("maml"), mlp(1, 1)
    model = Model(chosen, net, parameters(chosen, net))
    first, again = (evaluate(model, Sinusoid(), tasks=20, seed=3) for _ in range(2))
    assert torch.equal(first.values, again.values)
    assert not torch.equal(first.values, evaluate(model, Sinusoid(), tasks=20, seed=4).values)


def test_the_score_of_a_batch_does_not_depend_on_how_it_is_cut():
    chosen, net = method("anil"), mlp(1, 1)
    model = Model(chosen, net, parameters(chosen, net))

    class Fixed:
        outputs = 1

        def __init__(self):
            self.all, self.next = Sinusoid().sample(12, torch.Generator().manual_seed(0)), 0

        def sample(self, tasks, generator):
            self.next += tasks
            return self.all[self.next - tasks : self.next]

    whole, cut = evaluate(model, Fixed(), tasks=12, batch=12), evaluate(model, Fixed(), tasks=12, batch=5)
    assert torch.allclose(whole.values, cut.values, rtol=1e-5)
