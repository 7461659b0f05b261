"""Linear probes: they read what a linear map can read, and no more."""

import pytest
import torch

from diff_dalle.config import InputError
from diff_dalle.evaluators.image_variations import linear_probe


def features(n: int, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Two classes that differ in the sign of one small feature among large ones, one of which is constant."""
    generator = torch.Generator().manual_seed(seed)
    values = 100 * torch.randn(n, 5, generator=generator)
    values[:, 1], values[:, 2] = 0.01 * values[:, 1].sign() * (1 + values[:, 1].abs() / 100), 7.0
    return values, ["high" if value > 0 else "low" for value in values[:, 1]]


def test_what_is_linear_is_read_whatever_its_scale():
    known, labels = features(400, 0)
    asked, truth = features(200, 1)
    found = linear_probe(known, labels, asked)
    assert sum(a == b for a, b in zip(found, truth, strict=True)) >= 196
    assert found == linear_probe(known, labels, asked)


def test_what_is_not_there_is_not_read():
    known, labels = features(400, 0)
    asked, truth = features(400, 1)
    known, asked = known[:, [0, 3, 4]], asked[:, [0, 3, 4]]
    found = linear_probe(known, labels, asked)
    assert 150 <= sum(a == b for a, b in zip(found, truth, strict=True)) <= 250


def test_it_is_the_minimum_of_the_penalized_cross_entropy():
    """Against plain gradient descent on the same loss."""
    torch.manual_seed(0)
    known, asked = torch.randn(60, 3, dtype=torch.float64), torch.randn(500, 3, dtype=torch.float64)
    labels = ["abc"[int(i)] for i in (known[:, 0] > 0.3).long() + (known[:, 1] > 0).long()]
    mean, std = known.mean(0), known.std(0, unbiased=False)
    x, targets = (known - mean) / std, torch.tensor(["abc".index(label) for label in labels])
    weight, bias = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(6_000):
        error = (torch.softmax(x @ weight + bias, 1) - torch.eye(3, dtype=torch.float64)[targets]) / len(x)
        weight, bias = weight - 0.5 * (x.T @ error + 2e-3 * weight), bias - 0.5 * error.sum(0)
    plain = ((asked - mean) / std @ weight + bias).argmax(1)
    found = linear_probe(known, labels, asked)
    assert sum("abc"[i] == label for i, label in zip(plain.tolist(), found, strict=True)) >= 498


def test_labels_must_be_as_many_as_features():
    for labels in ([], ["a"] * 3):
        with pytest.raises(InputError, match=f"a probe got {len(labels)} labels for 2 features"):
            linear_probe(torch.zeros(2, 4), labels, torch.zeros(1, 4))
