import pytest
import torch
from network_making import seeded
from torch.testing import assert_close

from diff_dalle.models.latent import quantizer as module
from diff_dalle.models.latent.quantizer import USAGE_DECAY, Quantizer, one_vector, revived


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


def test_revival_replaces_the_least_used_entries_by_different_vectors():
    entries, usage = torch.zeros(5, 2), torch.tensor([0.5, 0.0, 3.0, 0.02, 0.01])
    candidates = torch.arange(1.0, 9).view(4, 2)
    found, counted, number = revived(entries, usage, candidates, 0.1, seed=1, step=7)
    assert number == 3 and (counted[[1, 3, 4]] == 1).all() and torch.equal(counted[[0, 2]], usage[[0, 2]])
    assert not found[[0, 2]].any() and not entries.any() and usage[1] == 0
    rows = [tuple(row) for row in found[[1, 3, 4]].tolist()]
    assert len(set(rows)) == 3 and set(rows) <= {tuple(row) for row in candidates.tolist()}
    again = revived(entries, usage, candidates, 0.1, seed=1, step=7)
    assert torch.equal(again[0], found)
    others = [revived(entries, usage, candidates, 0.1, s, n)[0] for s, n in ((1, 8), (1, 9), (2, 7), (3, 7))]
    assert not all(torch.equal(other, found) for other in others[:2])
    assert not all(torch.equal(other, found) for other in others[2:])


def test_revival_takes_no_more_than_there_are_candidates():
    usage = torch.tensor([0.03, 0.01, 0.02])
    found, counted, number = revived(torch.zeros(3, 2), usage, torch.ones(2, 2), 0.1, 0, 0)
    assert number == 2 and found.any(1).tolist() == [False, True, True] and counted[0] == usage[0]
    assert revived(torch.zeros(3, 2), torch.ones(3), torch.ones(2, 2), 0.1, 0, 0)[2] == 0


def test_a_quantizer_revives_its_own_entries():
    quantizer = make(3)
    quantizer.usage.copy_(torch.tensor([1.0, 0.0, 2.0]))
    kept = quantizer.codebook.weight[[0, 2]].clone()
    assert quantizer.revive(torch.full((2, 2), 9.0), 0.1, 0, 0) == 1
    assert quantizer.codebook.weight[1].tolist() == [9, 9] and quantizer.usage.tolist() == [1, 1, 2]
    assert torch.equal(quantizer.codebook.weight[[0, 2]], kept) and quantizer.codebook.weight.requires_grad
