import pytest
import torch

from diff_dalle.batch import Batch, Conditioning, moved, packed, unpacked
from diff_dalle.config import InputError


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


def test_everything_that_guidance_can_drop_is_dropped():
    """An image embedding and text states from outside leave nothing behind; a second drop adds to the first."""
    where = torch.tensor([True, False, True, False, False])
    cond = Conditioning(
        mask=torch.ones(5, 3, dtype=torch.bool),
        text_states=torch.ones(5, 3, 2),
        text_pooled=torch.ones(5, 2),
        image_embedding=torch.ones(5, 4),
    )
    dropped = cond.drop(where)
    assert not dropped.text_states[where].any() and not dropped.text_pooled[where].any()
    assert not dropped.image_embedding[where].any() and dropped.embedding_mask.tolist() == (~where).tolist()
    for name in ("text_states", "text_pooled", "image_embedding"):
        assert getattr(dropped, name)[~where].all()
    assert dropped.mask.sum(1).tolist() == [1, 3, 1, 3, 3]
    again = dropped.drop_embedding(torch.arange(5) == 4)
    assert again.embedding_mask.tolist() == [False, True, False, True, False]
    assert cond.drop_text(where).image_embedding.all() and cond.drop_embedding(where).mask.all()


def test_nothing_to_drop_is_an_error():
    cond = Conditioning(low_res=torch.zeros(2, 3, 4, 4))
    assert not cond.droppable
    with pytest.raises(InputError, match="no caption, class or image embedding to drop"):
        cond.drop(torch.ones(2, dtype=torch.bool))


def test_extra_conditions_travel_with_the_others():
    cond = Conditioning(labels=torch.arange(4), extra={"clip_tokens": torch.arange(8).view(4, 2)})
    assert cond.split(3)[1].extra["clip_tokens"].tolist() == [[6, 7]]
    assert cond.select([1, 0]).extra["clip_tokens"].tolist() == [[2, 3], [0, 1]]
    joined = Conditioning.concat(cond.split(1))
    assert torch.equal(joined.extra["clip_tokens"], cond.extra["clip_tokens"])
    assert cond.to("meta").extra["clip_tokens"].device.type == "meta"


def test_tensors_of_any_types_share_a_buffer_and_come_back():
    values = [
        torch.tensor([True, False, True]),
        torch.randn(3, 5)[:, ::2],
        torch.tensor(2**40),
        torch.zeros(0, 4),
        torch.randn(7, dtype=torch.float64).half(),
    ]
    buffer = packed(values)
    assert buffer.dtype == torch.uint8 and len(buffer) < sum(value.nbytes + 16 for value in values)
    for found, value in zip(unpacked(buffer, values), values, strict=True):
        assert found.dtype == value.dtype and torch.equal(found, value)
        assert found.data_ptr() % 8 == 0 or not found.numel()


def test_moved_tensors_keep_their_names_shapes_and_types():
    there = torch.zeros(2, device="meta")
    given = {"mask": torch.ones(3, 2, dtype=torch.bool), "there": there, "scale": torch.ones(())}
    found = moved(given, "meta")
    assert list(found) == list(given) and found["there"] is there
    assert all(value.is_meta and value.shape == given[name].shape for name, value in found.items())
    assert [value.dtype for value in found.values()] == [torch.bool, torch.float32, torch.float32]
    del given["there"]
    assert all(value is given[name] for name, value in moved(given, "cpu").items())
