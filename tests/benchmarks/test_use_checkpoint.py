import pytest
import torch

from benchmarks import use_checkpoint


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(use_checkpoint, "IMAGE_SIZE", 32)


def test_both_sides_give_the_same_loss_and_gradients():
    for found, allowed in use_checkpoint.gate().values():
        assert 0 <= found <= allowed


@pytest.mark.slow
def test_the_gate_sees_a_difference(monkeypatch):
    original = use_checkpoint.network

    def network(checkpointed):
        model = original(checkpointed)
        with torch.no_grad():
            model.unet.out_conv.bias += 0.01 * checkpointed
        return model

    monkeypatch.setattr(use_checkpoint, "network", network)
    assert all(found > allowed for found, allowed in use_checkpoint.gate().values())


@pytest.mark.slow
def test_the_checkpointed_side_saves_less_for_the_backward_pass():
    """Bytes saved by the timed work; views of one tensor count once."""
    sizes = []
    for side in (use_checkpoint.without_checkpoint, use_checkpoint.with_checkpoint):
        work, saved = side(), {}

        def save(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor  # a reference, so that the address is not reused
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = work()
        assert loss.isfinite()
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()))
    assert sizes[1] < 0.45 * sizes[0]
