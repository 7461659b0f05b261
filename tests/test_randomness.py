import numpy as np
import torch

from diff_dalle.randomness import Draw, mix64, permutation, random_bits, random_uniform


def test_splitmix64_known_values():
    """The first outputs of SplitMix64 seeded with 0 are published with the algorithm."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([0, golden, 2 * golden % 2**64], dtype=np.uint64)
    assert [f"{x:016x}" for x in mix64(states).tolist()] == ["e220a8397b1dcdaf", "6e789e6aa1b965f4", "06c45d188009454f"]


def test_values_depend_on_seed_purpose_and_position_only():
    a = random_bits(1, "noise", range(100))
    assert (a[10:20] == random_bits(1, "noise", range(10, 20))).all()
    assert len(set(a) | set(random_bits(2, "noise", range(100))) | set(random_bits(1, "crop", range(100)))) == 300


def test_uniform_is_uniform():
    u = random_uniform(3, "t", range(100_000))
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 20, (0, 1))[0]
    chi2 = ((counts - 5000) ** 2 / 5000).sum()
    assert chi2 < 43.8  # 99.9 % quantile of chi-square with 19 degrees of freedom


def test_permutation_is_one_and_is_keyed():
    p = permutation(1, "epoch 0", 1000)
    assert sorted(p) == list(range(1000))
    assert (p != permutation(1, "epoch 1", 1000)).mean() > 0.9


def test_draws_are_the_same_in_any_batch():
    whole = Draw(7, torch.arange(8))
    part = Draw(7, torch.tensor([5, 2]))
    assert torch.equal(whole.normal("noise", (3, 4, 4))[[5, 2]], part.normal("noise", (3, 4, 4)))
    assert torch.equal(whole.uniform("t")[[5, 2]], part.uniform("t"))
    assert torch.equal(whole.keys("dropout")[[5, 2]], part.keys("dropout"))


def test_normal_numbers_are_standard_and_independent():
    x = Draw(0, torch.arange(64)).normal("noise", (1000,))
    assert abs(x.mean()) < 0.02 and abs(x.std() - 1) < 0.02
    correlation = torch.corrcoef(x) - torch.eye(64)
    assert correlation.abs().max() < 0.15
