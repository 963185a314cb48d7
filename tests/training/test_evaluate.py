from __future__ import annotations

import pytest
import torch

from metabridge import Score, Sinusoid, evaluate, method, parameters
from metabridge.models import mlp
from metabridge.training import Model
from metabridge.training.evaluate import score_tasks


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


def test_every_task_is_scored_by_itself():
    chosen, net = method("anil"), mlp(1, 1)
    model = Model(chosen, net, parameters(chosen, net))

    class Fixed:
        outputs = 1

        def __init__(self):
            self.all, self.next = Sinusoid().sample(40, torch.Generator().manual_seed(0)), 0

        def sample(self, tasks, generator):
            self.next += tasks
            return self.all[self.next - tasks : self.next]

    scores = evaluate(model, Fixed(), tasks=40).values
    for task in (0, 17, 39):  # of the first, second and third batch
        alone = score_tasks(model.predict(Fixed().all[task]), Fixed().all[task])
        assert float(scores[task]) == pytest.approx(float(alone), rel=1e-5)
