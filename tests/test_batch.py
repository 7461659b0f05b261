import pytest
import torch

from diff_dalle.batch import Batch, Conditioning


def make(n=5):
    tokens = torch.arange(n * 4).reshape(n, 4)
    cond = Conditioning(tokens=tokens, mask=torch.ones(n, 4, dtype=torch.bool), labels=torch.arange(n))
    return Batch(torch.randn(n, 3, 2, 2), cond, torch.arange(10, 10 + n))


def test_split_and_concat_are_inverse():
    batch = make()
    pieces = batch.split(2)
    assert [len(piece) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece.images for piece in pieces]), batch.images)
    joined = Conditioning.concat([piece.cond for piece in pieces])
    assert all(torch.equal(joined.present()[name], value) for name, value in batch.cond.present().items())


def test_split_without_conditioning():
    assert [len(piece) for piece in Batch(torch.zeros(3, 1, 1, 1), Conditioning(), torch.arange(3)).split(2)] == [2, 1]


def test_concat_refuses_different_fields():
    with pytest.raises(ValueError, match="different fields"):
        Conditioning.concat([make().cond, Conditioning(labels=torch.zeros(1))])


def test_drop_leaves_the_start_token_and_the_empty_class():
    where = torch.tensor([True, False, True, False, False])
    cond = make().cond
    encoded = Conditioning(**cond.present(), text_states=torch.zeros(5, 4, 2), text_pooled=torch.zeros(5, 2))
    dropped = encoded.drop(where, num_classes=100)
    assert dropped.mask[where].sum(1).tolist() == [1, 1] and dropped.mask[where][:, 0].all()
    assert dropped.mask[~where].all()
    assert dropped.labels.tolist() == [100, 1, 100, 3, 4]
    assert dropped.text_states is None and dropped.text_pooled is None


def test_index_stays_on_the_cpu():
    assert make().to("meta").index.device.type == "cpu"
    assert make().to("meta").images.device.type == "meta"
