import pytest
import torch
from network_making import seeded
from torch.testing import assert_close

from diff_dalle.models.latent import stage_a as module
from diff_dalle.models.latent.stage_a import USAGE_DECAY, Quantizer, one_vector


def vectors(n=3, size=(4, 5), seed=0):
    return seeded(n, 2, *size, seed=seed)


def make(entries=7):
    torch.manual_seed(0)
    quantizer = Quantizer(entries, 2)
    with torch.no_grad():
        quantizer.codebook.weight.normal_()
    return quantizer


def test_initial_entries_are_small_and_uniform():
    weight = Quantizer(500, 3).codebook.weight
    assert 0.95 / 500 < weight.abs().max() <= 1 / 500 and (Quantizer(500, 3).usage == 1).all()


@pytest.mark.parametrize("distances", [2**24, 7 * 11])
def test_the_nearest_entry_is_chosen(monkeypatch, distances):
    """In as many pieces as needed."""
    monkeypatch.setattr(module, "DISTANCES", distances)
    quantizer, z = make(), vectors()
    entries = quantizer.codebook.weight
    distance = (z[:, :, None] - entries.T[None, :, :, None, None]).square().sum(1)
    found = quantizer(z)
    assert torch.equal(found.indices, distance.argmin(1))
    assert torch.equal(quantizer.nearest(z), found.indices)
    assert_close(found.vectors, quantizer.entries(found.indices))
    for i in range(3):
        assert torch.equal(quantizer.nearest(z[i : i + 1]), found.indices[i : i + 1])


def test_half_precision_around_it_changes_no_choice():
    quantizer, z = make(200), vectors(size=(16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        found = quantizer(z)
    assert torch.equal(found.indices, quantizer.nearest(z)) and found.vectors.dtype == torch.float32


def test_losses_and_gradients():
    """The gradient at the entries goes straight through to z; each loss moves one of the two."""
    quantizer, z = make(), vectors().requires_grad_()
    found = quantizer(z)
    expected = (z - quantizer.entries(found.indices)).square().mean((1, 2, 3))
    assert_close(found.codebook_loss, expected)
    assert_close(found.commitment, expected)
    weight = quantizer.codebook.weight
    through = torch.autograd.grad((found.vectors * 3).sum(), [z, weight], retain_graph=True, allow_unused=True)
    assert (through[0] == 3).all() and through[1] is None
    moved = torch.autograd.grad(found.codebook_loss.sum(), [z, weight], retain_graph=True, allow_unused=True)
    assert moved[0] is None and moved[1].any()
    committed = torch.autograd.grad(found.commitment.sum(), [z, weight], allow_unused=True)
    assert committed[0].any() and committed[1] is None
    difference = z - quantizer.entries(found.indices)
    assert_close(committed[0], 2 * difference / difference[0].numel())


def test_usage_follows_the_counts_of_the_whole_batch():
    quantizer, indices = make(3), torch.tensor([[[0, 0], [2, 0]], [[2, 2], [2, 2]]])
    counts = quantizer.counts(indices)
    assert counts.tolist() == [[3, 0, 1], [0, 0, 4]]
    quantizer.observe(counts)
    expected = USAGE_DECAY + (1 - USAGE_DECAY) * 3 * torch.tensor([3, 0, 5]) / 8
    assert_close(quantizer.usage, expected)
    assert "usage" in quantizer.state_dict()


def test_one_vector_of_each_sample():
    z = vectors()
    found = one_vector(z.requires_grad_(), torch.tensor([0.0, 0.5, 1 - 1e-9], dtype=torch.float64))
    assert torch.equal(found, torch.stack([z[0, :, 0, 0], z[1, :, 2, 0], z[2, :, 3, 4]])) and not found.requires_grad


def revived(usage, candidates, seed=1, step=7):
    """A quantizer after a revival of entries that were 0."""
    quantizer = Quantizer(len(usage), 2)
    with torch.no_grad():
        quantizer.codebook.weight.zero_()
    quantizer.usage.copy_(usage)
    quantizer.revive(candidates, 0.1, seed, step)
    return quantizer.codebook.weight.detach(), quantizer.usage


def test_revival_replaces_the_least_used_entries_by_different_vectors():
    usage, candidates = torch.tensor([0.5, 0.0, 3.0, 0.02, 0.01]), torch.arange(1.0, 9).view(4, 2)
    found, counted = revived(usage, candidates)
    assert (counted[[1, 3, 4]] == 1).all() and torch.equal(counted[[0, 2]], usage[[0, 2]]) and not found[[0, 2]].any()
    rows = [tuple(row) for row in found[[1, 3, 4]].tolist()]
    assert len(set(rows)) == 3 and set(rows) <= {tuple(row) for row in candidates.tolist()}
    assert torch.equal(revived(usage, candidates)[0], found)
    others = [revived(usage, candidates, seed, step)[0] for seed, step in ((1, 8), (1, 9), (2, 7), (3, 7))]
    assert not all(torch.equal(other, found) for other in others[:2])
    assert not all(torch.equal(other, found) for other in others[2:])


def test_revival_takes_no_more_than_there_are_candidates():
    usage = torch.tensor([0.03, 0.01, 0.02])
    found, counted = revived(usage, torch.ones(2, 2))
    assert found.any(1).tolist() == [False, True, True] and counted[0] == usage[0]
    assert not revived(torch.ones(3), torch.ones(2, 2))[0].any()
