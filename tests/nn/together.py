"""What the processes of test_distributed.py run: fit together, and the first writes what came out."""

import sys
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import equipool as ep
from equipool import distributed
from equipool import estimators as models
from equipool.data.volumes import Volumes
from equipool.estimators.pooling_estimator import voxel_scales
from equipool.groups import CovariateAction
from equipool.nn import (
    correlation_loss,
    equivariance_loss,
    grouped_mmd,
    match_loss,
    mmd,
    prediction_loss,
    reconstruction_loss,
)
from equipool.nn.networks import ResNet3d
from equipool.sites.design import Design
from equipool.sites.volume_model import fit_volume_model

ESTIMATORS = {
    "ours": models.EquivariantPooler(steps=16, batch_size=64),  # of each stage
    "transported": models.EquivariantPooler(steps=4, batch_size=50, match="transported"),
    "cai": models.CAIPooler(steps=40, batch_size=64),
    "ss": models.SubsamplingPooler(steps=12, batch_size=64),
    "rm": models.RandMatchPooler(steps=12, batch_size=64),
}


SITE = torch.arange(9) % 4  # the last process of two has none of site 0 if shared out by halves


def losses():
    """Yield each loss by name, as a function of codes."""
    site = SITE
    c = torch.linspace(-1, 1, 9).unsqueeze(1)
    group, partner, y = torch.arange(9) % 2, torch.tensor([1, 2, 3, -1, 5, 6, 7, 8, 0]), torch.arange(9) % 3
    yield "equation (4)", lambda z: equivariance_loss(z, c, CovariateAction.spread(6))
    yield "independence", lambda z: correlation_loss(z, c)
    yield "mmd", lambda z: mmd(z, site)
    yield "grouped mmd", lambda z: grouped_mmd(z, site, group)
    yield "matches", lambda z: match_loss(z, partner)
    yield "prediction", lambda z: prediction_loss(z[:, :3], y, class_weights=torch.tensor([1.0, 2.0, 3.0]))
    yield "bounded", lambda z: prediction_loss(z[:, :3], y, bounded=True)


def one_step(loss):
    """Return a loss of a batch, and the gradients of a network before the gathering and of one after it."""
    torch.manual_seed(3)
    before, after, x = nn.Linear(5, 6), nn.Linear(6, 6), torch.randn(9, 5)
    with distributed.sharded(len(x)):
        part = before(x[distributed.local_rows()])
        rebuilt = distributed.average(reconstruction_loss(part, part.sin()), len(part))
        value = loss(after(distributed.gather(part))) + rebuilt
    value.backward()
    both = nn.ModuleList([before, after])
    distributed.average_gradients(both)
    return torch.cat([value.detach().view(1), *(p.grad.flatten() for p in both.parameters())])


def volume_step():
    """Return the same of the 3-D network, with its batch normalisation and dropout."""
    torch.manual_seed(4)
    network, x, wanted = ResNet3d(6, hidden=8), torch.randn(9, 1, 16, 16, 16), torch.randn(9, 6)
    with distributed.sharded(len(x)):
        value = (distributed.gather(network(x[distributed.local_rows()])) - wanted).square().mean()
    value.backward()
    distributed.average_gradients(network)
    running = [value.flatten() for name, value in network.named_buffers() if "running" in name]
    gradients = [parameter.grad.flatten() for parameter in network.parameters()]
    return torch.cat([value.detach().view(1), *gradients, *running])


def arrays_of(part, name="model"):
    """Yield the arrays and numbers of a model by name."""
    if isinstance(part, tuple):
        for k, each in enumerate(part):
            yield from arrays_of(each, f"{name} {k}")
    elif is_dataclass(part):
        for key, value in vars(part).items():
            yield from arrays_of(value, f"{name} {key}")
    else:
        yield name, np.asarray(part)


def closed_form(rank):
    """Return what is learned of sites' volumes before training, and how many scans this process has read."""
    rng = np.random.default_rng(5)
    people, mask = 70, np.zeros((8, 9, 7), dtype=bool)
    mask[1:7, 1:8, 1:6] = True
    site, age = np.arange(people) % 2, rng.uniform(-1, 1, people)
    images = 200 + 9 * rng.normal(size=(people, *mask.shape)) + (5 * age + 20 * site)[:, None, None, None]
    volumes = Volumes.from_array(images, np.diag([4.0, 4, 4, 1]), mask)
    read, seen = Volumes.read, []
    Volumes.read = lambda self, rows=slice(None): seen.append(len(scans := read(self, rows))) or scans
    empty, fold = np.empty((people, 0)), np.arange(people) // 2 % 5
    model = fit_volume_model(volumes, Design(site, age[:, None], empty, np.ones(people), fold, 2))
    results = {f"closed form: {name}": value for name, value in arrays_of(model)}
    results["closed form: voxels"] = np.stack(voxel_scales(volumes, model.without_site))
    Volumes.read = read
    return results | {f"scans read by {rank}": np.array(sum(seen))}


def main(out):
    torch.set_num_threads(1)
    rank, size = distributed.start()
    results = {f"loss {name}": one_step(loss).numpy() for name, loss in losses()}
    distributed.SHARED_PAIRS = 2
    results |= {
        f"loss {name}, pairs shared out": one_step(loss).numpy() for name, loss in losses() if "mmd" in name
    }
    results["loss where most are alike"] = one_step(
        lambda z: mmd(z * (torch.arange(9) > 6)[:, None], SITE)
    ).numpy()
    distributed.SHARED_PAIRS = 1024
    results["loss of volumes"] = volume_step().numpy()
    results |= closed_form(rank)
    pool = ep.simulate_table(overlap=0.5, people=70, features=8).pool
    for name, estimator in ESTIMATORS.items():
        estimator.fit(pool.X, pool.y, site=pool.site_labels, covariates=pool.C)
        values = [value.flatten() for value in estimator.network_.state_dict().values()]
        results[f"parameters {name}"] = torch.cat(values).numpy()
        stages = estimator.history_
        epochs = [e for s in stages.values() for e in s] if isinstance(stages, dict) else stages
        results[f"history {name}"] = np.concatenate([list(epoch.values()) for epoch in epochs])
    estimator.save(out / f"model-{size}")
    np.savez(out / f"{rank}-of-{size}.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
