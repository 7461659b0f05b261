import pytest
import torch
from network_making import make_generator
from operation_counting import operations
from torch import nn

from diff_dalle.models.dropout import Dropout, keep_mask, layer_numbers, number_dropouts
from diff_dalle.randomness import Draw

GOLDEN = [[0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]
SALTS = torch.arange(10)
COUNT = 20_001  # not a multiple of 4, so that part of the last hash is unused


def mask_of(keys, salt, count, drop):
    return keep_mask(*layer_numbers(keys, salt), count, drop)


def masks(salt, drop, n=32):
    """Masks normalized to mean 0 and variance 1, so that the expected size of their correlations is known."""
    keys = Draw(0, torch.arange(n)).keys("dropout")
    keep = mask_of(keys, SALTS[salt], COUNT, drop).double()
    return (keep - (1 - drop)) / (drop * (1 - drop)) ** 0.5


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_masks_are_statistically_independent(drop):
    """The mean, and the correlations between samples, layers, neighbors and rows, are within 5 standard errors of 0."""
    a, b = masks(1, drop), masks(2, drop)
    bound = 5 / COUNT**0.5
    assert a.mean(1).abs().max() < bound and a.mean().abs() < bound / 32**0.5
    between_samples = (a @ a.T / COUNT).fill_diagonal_(0)
    assert between_samples.abs().max() < bound and (a @ b.T / COUNT).abs().max() < bound
    for lag in (1, 2, 16, 64, 4096):
        assert (a[:, lag:] * a[:, :-lag]).mean().abs() < bound / 32**0.5 * 1.2
    variance = a.mean(0).square().mean() * 32  # of one element over the samples: 1 if they are independent
    assert abs(variance - 1) < 5 * (2 / COUNT) ** 0.5


def test_keys_that_differ_in_few_bits_give_uncorrelated_masks():
    keys = torch.cat([torch.arange(16), torch.arange(1, 17) << 32])
    keep = (mask_of(keys, SALTS[1], COUNT, 0.5).double() - 0.5) * 2
    assert (keep @ keep.T / COUNT).fill_diagonal_(0).abs().max() < 5 / COUNT**0.5


def test_a_mask_is_a_function_of_sample_layer_and_element():
    keys = Draw(0, torch.arange(5)).keys("dropout")
    whole = mask_of(keys, SALTS[3], 101, 0.3)
    assert torch.equal(torch.cat([mask_of(part, SALTS[3], 101, 0.3) for part in keys.split(2)]), whole)
    assert torch.equal(mask_of(keys, SALTS[3], 64, 0.3), whole[:, :64])
    # Golden values: a resumed run must get the same masks.
    assert mask_of(torch.tensor([12345, -(2**63)]), SALTS[1], 12, 0.5).int().tolist() == GOLDEN


def uniformity(counts):
    """Chi-square of equal probabilities, in standard deviations."""
    expected, freedom = counts.sum() / counts.numel(), counts.numel() - 1
    return ((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5).item()


@pytest.mark.parametrize("keys", [torch.arange(16), Draw(0, torch.arange(16)).keys("dropout")], ids=["low", "random"])
def test_four_neighbors_in_many_samples_take_all_combinations_equally(keys):
    """The four elements that share a hash, and elements at the same place of neighboring hashes, samples and layers."""
    keep = torch.stack([mask_of(keys, salt, 1 << 16, 0.5) for salt in SALTS[:8]]).long()  # [8, 16, 65536]
    words = keep.unflatten(2, (-1, 4))
    along = {
        "hash": words,
        "next": keep.unflatten(2, (-1, 4, 4)).transpose(3, 4),
        "samples": keep.unflatten(1, (-1, 4)).transpose(2, 3),
        "layers": keep.unflatten(0, (-1, 4)).permute(0, 2, 3, 1),
    }
    for name, four in along.items():
        assert abs(uniformity((four * torch.tensor([1, 2, 4, 8])).sum(-1).flatten().bincount().double())) < 5, name


def test_a_mask_takes_few_operations_on_its_elements():
    keys, count = Draw(0, torch.arange(4)).keys("dropout"), 4096
    found = operations(lambda: mask_of(keys, SALTS[1], count, 0.1), least=4 * count // 4)
    assert found.total() <= 7, found


def test_the_layers_of_a_network_have_the_masks_of_single_layers_for_fewer_operations():
    """Whichever layer comes first, and whenever the keys change."""
    layers = [Dropout(0.5) for _ in range(6)]
    number_dropouts(nn.Sequential(*layers))
    x, first, second = torch.ones(4, 40), torch.tensor([1, 2, 3, -4]), torch.tensor([5, 6, 7, 8])
    for keys in (first, second, first.clone()):
        for layer in reversed(layers):
            assert torch.equal(layer(x, keys) != 0, mask_of(keys, layer.salt, 40, 0.5))
    alone = operations(lambda: mask_of(first, layers[0].salt, 40, 0.5)).total()
    mask = (
        operations(lambda: keep_mask(*layer_numbers(first, layers[0].salt), 40, 0.5)).total()
        - operations(lambda: layer_numbers(first, layers[0].salt)).total()
    )
    together = operations(lambda: [layer(x, second) for layer in layers]).total() - 6 * 3  # scale, zero and choice
    assert together == 6 * mask + (alone - mask) + 1 and together < 0.6 * 6 * alone


def test_dropout_keeps_the_mean_and_is_off_in_evaluation():
    layer, x, keys = Dropout(0.25), torch.ones(8, 30, 40), torch.arange(8)
    out = layer(x, keys)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(out.mean() - 1) < 5 * (0.25 / 0.75 / out.numel()) ** 0.5
    assert not torch.equal(layer(x, None), layer(x, None))
    assert layer.eval()(x, keys) is x


def test_every_layer_of_a_network_has_its_own_number():
    salts = [int(m.salt) for m in make_generator().modules() if isinstance(m, Dropout)]
    assert salts == list(range(1, len(salts) + 1))
