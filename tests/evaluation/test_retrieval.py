"""Retrieval: counted by hand."""

import numpy as np
import pytest
import torch

from diff_dalle.evaluation.plots import COLORS, REFERENCE
from diff_dalle.evaluation.retrieval import RetrievalTable, retrieval, same_captions


def test_captions_are_equal_if_their_real_tokens_are():
    tokens = torch.tensor([[1, 2, 9, 9], [1, 2, 7, 7], [1, 2, 9, 9], [1, 3, 9, 9]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    expected = torch.eye(4).bool()
    expected[0, 1] = expected[1, 0] = True
    assert torch.equal(same_captions(tokens, mask), expected)


def test_both_directions_and_depths_are_counted():
    """Six samples whose similarity is a table: rows are images, columns captions."""
    similarity = torch.eye(6)
    similarity[0, 1] = 2.0  # image 0 prefers caption 1, and caption 1 image 0
    similarity[2, [0, 1, 3, 4, 5]] = 3.0  # image 2 prefers every other caption to its own, and they all prefer it
    found = retrieval(similarity, torch.eye(6), torch.eye(6).bool())
    assert {name: values.tolist() for name, values in found.items()} == {
        "image_to_text_at_1": [0, 1, 0, 1, 1, 1],
        "image_to_text_at_5": [1, 1, 0, 1, 1, 1],
        "text_to_image_at_1": [0, 0, 1, 0, 0, 0],
        "text_to_image_at_5": [1, 1, 1, 1, 1, 1],
    }


def test_either_of_two_equal_captions_is_right():
    images, texts = torch.eye(3), torch.eye(3)[[1, 0, 2]]  # each of the first two images finds the other's caption
    same = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]).bool()
    assert retrieval(images, texts, torch.eye(3).bool())["image_to_text_at_1"].tolist() == [0, 0, 1]
    assert retrieval(images, texts, same)["image_to_text_at_1"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [2, 64])
def test_equal_features_are_at_chance(size):
    """A network that has collapsed must not look as if it knew."""
    same = torch.ones(size, 4) / 2
    found = retrieval(same, same, torch.eye(size).bool())
    assert [values.mean().item() for values in found.values()] == [1 / size, min(1.0, 5 / size)] * 2


def make_table(candidates=8):
    names = [f"{direction}_at_{depth}" for direction in ("image_to_text", "text_to_image") for depth in (1, 5)]
    values = {
        RetrievalTable.value_name(name, t): (k + 1) / 10 + t / 1000 for k, name in enumerate(names) for t in (0, 50)
    }
    return RetrievalTable.from_values({**values, "loss": 3.0}, [0, 50], candidates)


def test_the_table_says_what_was_found_and_what_chance_is():
    lines = make_table().text().splitlines()
    assert lines[0] == "Retrieval among 8 by noise level"
    assert lines[1] == "| t | image to text R@1 | image to text R@5 | text to image R@1 | text to image R@5 |"
    assert lines[3:] == [
        "| 0 | 0.100 | 0.200 | 0.300 | 0.400 |",
        "| 50 | 0.150 | 0.250 | 0.350 | 0.450 |",
        "| chance | 0.125 | 0.625 | 0.125 | 0.625 |",
    ]
    assert make_table(3).text().splitlines()[-1] == "| chance | 0.333 | 1.000 | 0.333 | 1.000 |"


def test_the_plot_shows_four_lines_and_chance():
    pixels = np.asarray(make_table().plot())
    for color, rises in (*((color, True) for color in COLORS[:4]), (REFERENCE, False)):  # chance is level
        rows, columns = find(pixels, color)
        assert columns.max() - columns.min() > 300
        left, right = (rows[columns == end].mean() for end in (columns.min(), columns.max()))
        assert (left - right > 5) == rises


def find(pixels, color):
    """Rows and columns of the pixels of a color inside the axes, without tick labels and legend."""
    rgb = [int(color[k : k + 2], 16) for k in (1, 3, 5)]
    return np.nonzero((pixels[:460, 100:650] == rgb).all(2))
