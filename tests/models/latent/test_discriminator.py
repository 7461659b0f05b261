from dataclasses import replace

import pytest
import torch
from network_making import pixels, randomize
from refusing import refused
from torch.nn import functional as F
from torch.testing import assert_close

from diff_dalle.models.latent.discriminator import (
    Discriminator,
    DiscriminatorConfig,
    SpectralConv2d,
    adversarial_loss,
    discriminator_loss,
)

TINY = DiscriminatorConfig(discriminator_depth=3, discriminator_width=16)


def make(config=TINY):
    torch.manual_seed(0)
    return randomize(Discriminator(config))


def images(n=3, size=(16, 24)):
    return pixels(n, 3, *size)


def test_released_size():
    """Six convolutions of 64 to 512 channels."""
    with torch.device("meta"):
        network = Discriminator(DiscriminatorConfig())
    assert sum(p.numel() for p in network.parameters()) == 6_271_105
    assert network.config.widths == (64, 128, 256, 512, 512, 512)


def test_the_layers_in_order():
    """Convolutions of spectral norm 1, instance norm from the second on, leaky ReLUs, and no sigmoid."""
    network, h = make(), images()
    for i, conv in enumerate(network.convs):
        sigma = torch.linalg.vector_norm(conv.weight.flatten(1).T @ conv.direction)
        h = F.conv2d(h, conv.weight / sigma, conv.bias, stride=2, padding=1)
        if i:
            h = (h - h.mean((2, 3), keepdim=True)) / (h.var((2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        h = torch.where(h > 0, h, 0.2 * h)
    out = network(images())
    assert_close(out, F.conv2d(h, network.out_conv.weight, network.out_conv.bias))
    assert out.shape == (3, 1, 2, 3)
    with torch.no_grad():
        network.out_conv.bias += 5
    assert (network(images()) > 1).all()


def test_the_spectral_norm_is_found_and_followed():
    torch.manual_seed(0)
    conv = SpectralConv2d(6, 10, 3, 1, 1)

    def largest():
        effective = conv.weight / torch.linalg.vector_norm(conv.weight.flatten(1).T @ conv.direction)
        return torch.linalg.matrix_norm(effective.flatten(1), 2).item()

    assert largest() == pytest.approx(1, abs=0.03)
    with torch.no_grad():
        conv.weight.normal_()
    moved = largest()
    for _ in range(30):
        conv.iterate()
    assert moved > 1.2 and largest() == pytest.approx(1, abs=1e-2)


def test_the_forward_pass_changes_no_state():
    """A step gives the same in one micro-batch or several; the iteration is a step of its own."""
    network, x = make(), images()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    out = network(x)
    for i in range(3):
        assert_close(network(x[i : i + 1]), out[i : i + 1])
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    network.iterate()
    changed = {name for name, value in network.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == {f"convs.{i}.direction" for i in range(3)}


def test_gradients():
    """Through the normalized weights, as of a plain division by the largest singular value."""
    torch.manual_seed(0)
    conv, x = SpectralConv2d(2, 3, 3, 1, 1), torch.randn(2, 2, 5, 5)
    for _ in range(200):
        conv.iterate()
    (ours,) = torch.autograd.grad(conv(x).square().sum(), conv.weight)
    weight = conv.weight / torch.linalg.matrix_norm(conv.weight.flatten(1), 2)
    (expected,) = torch.autograd.grad(F.conv2d(x, weight, conv.bias, padding=1).square().sum(), conv.weight)
    assert_close(ours, expected, rtol=1e-3, atol=1e-3)


def test_hinge_losses():
    real, fake = torch.tensor([0.5, 3.0, -2.0, 1.0]), torch.tensor([-0.5, -3.0, 2.0, -1.0])
    real, fake = (logits.view(2, 1, 1, 2) for logits in (real, fake))
    assert discriminator_loss(real, fake).tolist() == [(0.5 + 0.5) / 4, (3 + 3) / 4]
    assert adversarial_loss(fake).tolist() == [1.75, -0.5]


def test_impossible_settings_are_refused():
    with refused("discriminator_depth is 0"):
        replace(TINY, discriminator_depth=0)
    with refused("discriminator_width is 12, but must be at least 8, at most 65,536 and a multiple of 8"):
        replace(TINY, discriminator_width=12)
    with refused("24×8 pixels, but discriminator_depth 3 needs more than 8"):
        make()(images(size=(8, 24)))
    make()(images(size=(9, 24)))
