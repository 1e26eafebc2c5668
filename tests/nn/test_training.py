import pytest
import torch
from torch import nn

from equipool.nn import site_batches, train


@pytest.mark.parametrize("sizes", [(100, 50, 7), (300, 1), (64, 64, 64, 2)])
def test_every_row_comes_and_every_site_is_in_every_batch(sizes):
    site = torch.cat([torch.full((size,), k) for k, size in enumerate(sizes)])
    site = site[torch.randperm(len(site))]
    batches = list(site_batches(site, 32, torch.Generator().manual_seed(int(torch.randint(9999, ())))))
    assert set(torch.cat(batches).tolist()) == set(range(len(site)))
    for batch in batches:
        assert torch.unique(site[batch]).tolist() == list(range(len(sizes)))
    large = torch.bincount(site[torch.cat(batches)])[0]
    assert large <= sizes[0] + 2  # only what a batch lacks is drawn again: at most in the short last one


def test_training_goes_back_to_the_best_state():
    model = nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    scores = iter([3.0, 1.0, 2.0, 2.5, 4.0, 5.0])
    states = []

    def validate():
        states.append(model.weight.item())
        return next(scores)

    history = train(
        model,
        lambda rows, epoch: {"loss": (model(x[rows]) - 3 * x[rows]).square().mean()},
        lambda: iter([torch.arange(20)]),
        epochs=6,
        validate=validate,
        patience=3,
        learning_rate=0.1,
    )
    assert history.best_epoch == 1
    assert len(history.epochs) == 5
    assert model.weight.item() == pytest.approx(states[1])
    assert [set(epoch) for epoch in history.epochs] == [{"loss", "validation"}] * 5


def test_training_learns():
    model = nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    site = torch.arange(64) % 2
    generator = torch.Generator().manual_seed(0)
    train(
        model,
        lambda rows, epoch: {"loss": (model(x[rows]) - 3 * x[rows] - 1).square().mean()},
        lambda: site_batches(site, 16, generator),
        epochs=150,
        learning_rate=0.05,
    )
    assert model.weight.item() == pytest.approx(3, abs=0.05)
    assert model.bias.item() == pytest.approx(1, abs=0.05)
