import pytest
import torch

from diff_dalle.benchmarks import use_checkpoint


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(use_checkpoint, "IMAGE_SIZE", 32)


def test_both_sides_give_the_same_loss_and_gradients():
    for found, allowed in use_checkpoint.gate().values():
        assert 0 <= found <= allowed


def test_the_gate_sees_a_difference(monkeypatch):
    made = use_checkpoint.network

    def network(recomputes):
        model = made(recomputes)
        with torch.no_grad():
            model.unet.out_conv.bias += 0.01 * recomputes
        return model

    monkeypatch.setattr(use_checkpoint, "network", network)
    assert all(found > allowed for found, allowed in use_checkpoint.gate().values())


def test_one_side_keeps_everything_and_the_other_a_part():
    """Bytes saved for the backward pass of the work that is timed, views of one tensor counted once."""
    sizes = []
    for side in (use_checkpoint.keeping, use_checkpoint.recomputing):
        work, kept = side(), {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = work()
        assert loss.isfinite()
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    assert sizes[1] < 0.45 * sizes[0]
