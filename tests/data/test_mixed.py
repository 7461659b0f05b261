"""Batches of samples to learn and of regularization images."""

import itertools

import pytest
import torch
from shard_making import Letters, captions_of, load

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.data.mixed import MixedLoader
from diff_dalle.data.spec import CaptionSpec, ImageSpec, SampleSpec
from diff_dalle.training.task import Task
from diff_dalle.worlds.shapes.scenes import ShapesConfig
from diff_dalle.worlds.shapes.shards import write_shapes


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for name, seed in (("own", 0), ("prior", 1)):
        config = ShapesConfig(image_size=16, train_samples=24, val_samples=0, samples_per_shard=8, seed=seed)
        write_shapes(config, str(folder / name))
    return folder


def mixed(shards, batch_size: int, rank: int = 0, world_size: int = 1, captions=()) -> MixedLoader:
    spec, ranks = SampleSpec(ImageSpec((16, 16)), captions), {"rank": rank, "world_size": world_size}
    own, prior = (load(shards / name, spec, batch_size=batch_size // 2, **ranks) for name in ("own", "prior"))
    return MixedLoader(own, prior, 0.25)


def by_position(batches) -> dict[int, tuple[torch.Tensor, float]]:
    return {
        int(index): (image, float(weight))
        for batch in batches
        for index, image, weight in zip(batch.index, batch.images, batch.weight, strict=True)
    }


def test_positions_determine_the_samples_whatever_the_number_of_processes(shards):
    one = by_position(itertools.islice(mixed(shards, 8).batches(8), 3))
    assert sorted(one) == list(range(8, 32))
    ranks = [mixed(shards, 4, rank, 2) for rank in range(2)]
    two = by_position(batch for loader in ranks for batch in itertools.islice(loader.batches(8), 3))
    assert one.keys() == two.keys()
    for position, (image, weight) in one.items():
        assert torch.equal(image, two[position][0]) and weight == two[position][1]
        assert weight == (1.0 if position % 8 < 4 else 0.25)


def test_halves_are_those_of_the_two_loaders(shards):
    loader = mixed(shards, 8)
    first = next(loader.batches(0))
    assert torch.equal(first.images[:4], loader.own.batch_at(range(4)).images)
    assert torch.equal(first.images[4:], loader.prior.batch_at(range(4)).images)
    assert loader.describe(3) == loader.own.describe(3) and loader.describe(5) == loader.prior.describe(1)
    assert loader.describe(9) == loader.own.describe(5)
    again = loader.batch_at([5, 3, 9])
    assert again.index.tolist() == [3, 9, 5] and torch.equal(again.images[2], first.images[5])
    assert (
        loader.samples == 48
        and len(loader.collection.shards) == 6
        and torch.equal(loader.first(3).images, first.images[:3])
    )


def test_the_first_captions_are_those_of_the_samples_to_learn(shards):
    loader = mixed(shards, 8, captions=(CaptionSpec(Letters(), 99),))
    texts = loader.first_captions(3)
    assert texts == captions_of(loader.first(3)) == loader.own.first_captions(3) != loader.prior.first_captions(3)


class Squares(Task):
    """The loss of a sample is its image times one parameter."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(1, 1, bias=False)

    def losses(self, batch, draw):
        return {"loss": self.model(batch.images.flatten(1)[:, :1])[:, 0]}


def test_weights_of_samples_multiply_their_losses():
    images, index = torch.tensor([1.0, 2.0, 4.0]).view(3, 1, 1, 1), torch.arange(3)
    gradients = []
    for weight in (None, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 0.5, 0.0])):
        task, batch = Squares(), Batch(images, Conditioning(), index, weight)
        pieces = [(piece.to("cpu"), None) for piece in batch.select([0, 1, 2]).split(2)]
        task.backward(pieces, lambda piece, draw, sync, task=task: task(piece, draw), 3.0)
        gradients.append(float(task.model.weight.grad))
    assert gradients == [7.0, 7.0, 2.0]
