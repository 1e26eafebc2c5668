"""Networks for volumes: where voxels go, their precision, and modules of the user's."""

import pytest
import torch
from torch import nn

from equipool.nn import coders
from equipool.nn.networks import ResNet3d, VolumeDecoder, VolumeEncoder


class Seen(nn.Module):
    """Keeps what it is given, and returns its mean and that times a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, box):
        self.box = box
        mean = box.flatten(1).mean(dim=1, keepdim=True)
        return torch.cat([mean, self.weight * mean], dim=1)


@pytest.fixture
def mask():
    inside = torch.zeros(5, 6, 7, dtype=torch.bool)
    inside[1:4, 2:5, 1:6] = True
    inside[2, 3, 3] = False
    return inside


def test_voxels_go_where_they_belong(mask):
    rows = torch.randn(3, int(mask.sum()))
    body = Seen()
    VolumeEncoder(mask, body)(rows)
    assert body.box.shape == (3, 1, 5, 6, 7)
    assert torch.equal(body.box[:, 0][:, mask], rows)
    assert (body.box[:, 0][:, ~mask] == 0).all()


def test_a_decoder_may_give_boxes_or_rows(mask):
    boxes = torch.randn(2, 1, *mask.shape)

    class Fixed(nn.Module):
        def __init__(self, out):
            super().__init__()
            self.out = out

        def forward(self, _):
            return self.out

    latent = torch.randn(2, 4)
    from_boxes = VolumeDecoder(mask, Fixed(boxes))(latent)
    from_rows = VolumeDecoder(mask, Fixed(boxes[:, 0][:, mask]))(latent)
    assert torch.equal(from_boxes, from_rows)
    assert torch.equal(from_boxes, boxes[:, 0][:, mask])


def test_networks_for_volumes_stay_in_single_precision(mask):
    encoder, decoder = coders("auto", int(mask.sum()), 4, mask=mask)
    for module in (encoder.double(), decoder.double()):
        kinds = {p.dtype for p in (*module.parameters(), *module.buffers()) if p.is_floating_point()}
        assert kinds == {torch.float32}
    code = encoder.eval()(torch.randn(2, int(mask.sum())).double())
    assert code.dtype == torch.float64
    assert decoder(code).dtype == torch.float64


def test_modules_of_the_user_are_copied(mask):
    encoder_given, back = Seen(), nn.Linear(2, int(mask.sum()))
    encoder, decoder = coders(encoder_given, int(mask.sum()), 2, mask=mask, decoder=back)
    with torch.no_grad():
        for parameter in (*encoder.parameters(), *decoder.parameters()):
            parameter.add_(1.0)
    assert encoder_given.weight.item() == 2.0
    assert not torch.equal(decoder.body.weight, back.weight)


@pytest.mark.parametrize("shape", [(46, 55, 46), (23, 28, 23), (9, 12, 8)])
def test_the_resnet_takes_boxes_of_any_size(shape):
    assert ResNet3d(5).eval()(torch.zeros(1, 1, *shape)).shape == (1, 5)
