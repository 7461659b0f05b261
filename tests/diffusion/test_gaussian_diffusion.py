"""The process: identities between predictions, losses, weights, precision, and edge cases."""

import itertools
import math

import numpy as np
import pytest
import torch
from network_making import pixels, seeded
from refusing import refused
from torch.distributions import Normal
from torch.testing import assert_close

from diff_dalle.diffusion import (
    SCHEDULES,
    GaussianDiffusion,
    LossType,
    ModelMeanType,
    ModelVarType,
    get_named_beta_schedule,
)
from diff_dalle.diffusion.losses import discretized_gaussian_log_likelihood, min_snr_weights, p2_weights

ANY_MEAN = ModelMeanType.EPSILON, ModelMeanType.START_X, ModelMeanType.VELOCITY
MSE, FIXED, RANGE = LossType.MSE, ModelVarType.FIXED_SMALL, ModelVarType.LEARNED_RANGE
X_START = pixels(4, 3, 4, 4, seed=1)
NOISE = seeded(4, 3, 4, 4, seed=2)
T = torch.tensor([0, 3, 20, 39])


def make(mean=ModelMeanType.EPSILON, variance=FIXED, loss=MSE, betas=None, **kwargs):
    betas = get_named_beta_schedule("linear", 40) if betas is None else betas
    return GaussianDiffusion(betas=betas, model_mean_type=mean, model_var_type=variance, loss_type=loss, **kwargs)


def truth(process, x_start, t=T, noise=NOISE):
    """The prediction that means ``x_start`` at x_t = q_sample(X_START, t, noise)."""
    x_t = process.q_sample(X_START, t, noise)
    eps = process._predict_eps_from_xstart(x_t, t, x_start)
    return {
        ModelMeanType.EPSILON: eps,
        ModelMeanType.START_X: x_start,
        ModelMeanType.VELOCITY: process._velocity(x_start, t, eps),
        ModelMeanType.PREVIOUS_X: process.q_posterior_mean_variance(x_start, x_t, t)[0],
    }[process.model_mean_type]


def constant(output):
    return lambda x, t, **_: output


@pytest.mark.parametrize("mean", ModelMeanType)
def test_every_prediction_type_means_the_same(mean):
    """A correct prediction of any type gives x_start, the posterior mean, loss 0, and a bound near 0."""
    process = make(mean)
    x_t = process.q_sample(X_START, T, NOISE)
    out = process.p_mean_variance(constant(truth(process, X_START)), x_t, T, clip_denoised=False)
    assert_close(out["pred_xstart"], X_START, atol=1e-4, rtol=0)
    assert_close(out["mean"], process.q_posterior_mean_variance(X_START, x_t, T)[0], atol=1e-5, rtol=0)
    target = process.target(X_START, T, NOISE)
    assert_close(target, truth(process, X_START), atol=1e-4, rtol=0)
    assert process.training_losses(constant(target), X_START, T, noise=NOISE)["loss"].max() == 0
    bound = make(mean, loss=LossType.KL).training_losses(constant(target), X_START, T, noise=NOISE)["loss"]
    assert bound[1:].abs().max() < 1e-4


@pytest.mark.parametrize("variance", ModelVarType)
@pytest.mark.parametrize("mean", ModelMeanType)
def test_one_common_step_is_the_same_as_one_per_sample(mean, variance):
    """``predict`` with an int and ``p_mean_variance`` with a tensor agree, including clipping."""
    process = make(mean, variance)
    channels = 6 if variance.is_learned else 3
    output = seeded(4, channels, 4, 4, seed=3)
    for t in (0, 20):
        steps = torch.full((4,), t)
        one = process.predict(output, NOISE, t, True, lambda x: 0.5 * x)
        each = process.p_mean_variance(constant(output), NOISE, steps, True, lambda x: 0.5 * x)
        assert_close(one.x_start, each["pred_xstart"], atol=1e-5, rtol=1e-5)
        assert_close(one.mean, each["mean"], atol=1e-5, rtol=1e-5)
        log_variance = torch.as_tensor(one.log_variance).float().expand(NOISE.shape)
        assert_close(log_variance, each["log_variance"], atol=1e-5, rtol=1e-5)
        assert_close(process.q_sample(one.x_start, steps, one.eps), NOISE, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("loss", "name", "error"),
    [
        (LossType.L1, "l1", lambda d: d.abs()),
        (LossType.HUBER, "huber", lambda d: torch.where(d.abs() < 1, d**2 / 2, d.abs() - 0.5)),
    ],
)
def test_l1_and_huber(loss, name, error):
    """The error is the formula's mean over pixels, and a learned variance adds its term × T/1000."""
    output = seeded(4, 6, 4, 4, seed=4) * 2
    expected = error(NOISE - output[:, :3]).mean((1, 2, 3))
    plain = make(loss=loss).training_losses(constant(output[:, :3]), X_START, T, noise=NOISE)
    assert_close(plain["loss"], expected)
    learned = make(variance=RANGE, loss=loss).training_losses(constant(output), X_START, T, noise=NOISE)
    unscaled = make(variance=RANGE, loss=MSE).training_losses(constant(output), X_START, T, noise=NOISE)
    assert_close(learned[name], expected)
    assert_close(learned["vb"], unscaled["vb"] * 40 / 1000)
    assert_close(learned["loss"], learned[name] + learned["vb"])


@pytest.mark.parametrize("loss", [MSE, LossType.RESCALED_MSE, LossType.L1])
def test_the_weight_of_the_variational_term(loss):
    """Replaces that of the loss type; 0 = no term."""
    output = seeded(4, 6, 4, 4, seed=4)
    bound = make(variance=RANGE).training_losses(constant(output), X_START, T, noise=NOISE)["vb"]
    for weight in (0.0, 0.001, 2.0):
        terms = make(variance=RANGE, loss=loss, vb_loss_weight=weight).training_losses(
            constant(output), X_START, T, noise=NOISE
        )
        assert_close(terms["vb"], weight * bound)
        error = next(value for name, value in terms.items() if name in ("mse", "l1"))
        assert_close(terms["loss"], error + terms["vb"])


def test_a_constrained_variance_stays_within_its_range():
    """The fraction is the sigmoid of what it would be."""
    process, t = make(variance=RANGE, constrain_variance=True), torch.arange(40)
    x = torch.zeros(40, 3, 2, 2)
    low, high = process.posterior_log_variance_clipped, np.log(process.betas)
    for value in (-50.0, -1.0, 0.3, 1.0, 50.0):
        output = torch.cat([x, torch.full_like(x, value)], dim=1)
        found = process.p_mean_variance(constant(output), x, t)["log_variance"][:, 0, 0, 0]
        share = 1 / (1 + np.exp(-(value + 1) / 2))
        np.testing.assert_allclose(found, share * high + (1 - share) * low, rtol=1e-5)


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mean", ANY_MEAN)
def test_extreme_variances_have_finite_losses_and_gradients(mean, name, constrained):
    """Raw fractions from -10 to 10 at every step, t = 0 and the last included, for close and for wrong predictions; the
    bound as the loss, too."""
    for steps, loss in itertools.product((20, 1000), (MSE, LossType.RESCALED_KL)):
        betas = get_named_beta_schedule(name, steps)
        process = make(mean, RANGE, loss, betas, constrain_variance=constrained)
        t = torch.tensor([0, 0, 1, steps - 1]).repeat(5)
        raw = torch.linspace(-10, 10, 5).repeat_interleave(4)
        x_start, noise = X_START.repeat(5, 1, 1, 1), NOISE.repeat(5, 1, 1, 1)
        target = process.target(x_start, t, noise)
        for error in (0.0, 1.0):
            output = torch.cat([target + error, raw.view(-1, 1, 1, 1).expand_as(target)], 1).requires_grad_()
            losses = process.training_losses(constant(output), x_start, t, noise=noise)
            losses["loss"].sum().backward()
            assert all(values.isfinite().all() for values in losses.values())
            assert output.grad.isfinite().all()
            assert output.grad[2:, 3:].abs().sum() > 0  # the bound still trains the variance


@pytest.mark.parametrize("mean", ANY_MEAN)
@pytest.mark.parametrize("name", ["linear", "cosine", "sigmoid"])
def test_the_bound_of_an_exact_denoiser_is_zero(mean, name):
    """With the variance of the posterior, for every prediction; read as another, it would cost ten times as much."""
    process = make(mean, RANGE, betas=get_named_beta_schedule(name, 1000), vb_loss_weight=1.0)
    t = torch.tensor([1, 10, 400, 990])
    target = process.target(X_START, t, NOISE)
    output = torch.cat([target, torch.full_like(target, -1.0)], dim=1)
    terms = process.training_losses(constant(output), X_START, t, noise=NOISE)
    assert terms["mse"].max() == 0 and terms["vb"].abs().max() < 1e-5
    for other in {*ANY_MEAN} - {mean}:
        misread = make(other, RANGE, betas=process.betas, vb_loss_weight=1.0)
        assert misread.training_losses(constant(output), X_START, t, noise=NOISE)["vb"].max() > 1e-4


@pytest.mark.parametrize("weighting", [min_snr_weights, p2_weights])
def test_weights_mean_the_same_for_every_prediction_type(weighting):
    """The same wrong x_start has the same loss for every prediction type; without weights it does not."""
    wrong, t = X_START + 0.1, torch.tensor([1, 3, 20, 39])
    losses = {}
    for mean in ModelMeanType:
        process = make(mean, loss_weighting=weighting)
        terms = process.training_losses(constant(truth(process, wrong, t)), X_START, t, noise=NOISE)
        losses[mean] = terms["loss"]
        assert (terms["mse"] / terms["loss"]).std() > 0.1 or mean == ModelMeanType.START_X
    snr = torch.tensor(process.snr)[t]
    expected = {min_snr_weights: snr.clamp(max=5), p2_weights: snr / (1 + snr)}[weighting].float() * 0.01
    for found in losses.values():
        assert_close(found, expected, rtol=2e-3, atol=0)


def test_weights_leave_the_bound_alone():
    """The variational term of a learned variance is not weighted; a loss that is a bound cannot be."""
    output = seeded(4, 6, 4, 4, seed=4)
    plain = make(variance=RANGE).training_losses(constant(output), X_START, T, noise=NOISE)
    weighted = make(variance=RANGE, loss_weighting=p2_weights).training_losses(
        constant(output), X_START, T, noise=NOISE
    )
    assert torch.equal(plain["vb"], weighted["vb"]) and torch.equal(plain["mse"], weighted["mse"])
    assert (weighted["loss"] < plain["loss"]).all()
    with refused("RESCALED_KL"):
        make(loss=LossType.RESCALED_KL, loss_weighting=p2_weights)


def test_the_bound_trains_only_the_variance():
    """With an error as the loss, the mean's gradient is the error's alone, and the variance gets one."""
    output = torch.randn(4, 6, 4, 4, generator=torch.Generator().manual_seed(5), requires_grad=True)
    terms = make(variance=RANGE).training_losses(constant(output), X_START, T, noise=NOISE)
    (gradient,) = torch.autograd.grad(terms["loss"].sum(), output)
    assert_close(gradient[:, :3], 2 * (output[:, :3] - NOISE).detach() / 48)
    assert gradient[:, 3:].abs().amax((1, 2, 3)).min() > 0


@pytest.mark.parametrize("loss", [LossType.MSE, LossType.KL, LossType.L1, LossType.HUBER])
def test_losses_are_float32_for_half_precision_networks(loss):
    """A float16 output under autocast gives the float32 losses of the same numbers."""
    output = seeded(4, 6, 4, 4, seed=5).half()
    process = make(variance=RANGE, loss=loss)
    full = process.training_losses(constant(output.float()), X_START, T, noise=NOISE)
    with torch.autocast("cpu", torch.bfloat16):
        half = process.training_losses(constant(output), X_START, T, noise=NOISE)
    for name, value in half.items():
        assert value.dtype == torch.float32
        assert_close(value, full[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("mean", ModelMeanType)
@pytest.mark.parametrize(("schedule", "steps"), [*((name, 1) for name in SCHEDULES), ("jsd", 9), ("linear", 20)])
def test_edges_are_finite(schedule, steps, mean):
    """Processes of one step, and those that end without any signal: tables, losses, loops and likelihood are finite."""
    betas = get_named_beta_schedule(schedule, steps)
    for weighting in (None, min_snr_weights):
        process = make(mean, RANGE, betas=betas, loss_weighting=weighting)
        assert all(np.isfinite(value).all() for value in vars(process).values() if isinstance(value, np.ndarray))
        model = constant(seeded(2, 6, 4, 4, seed=6))
        t = torch.tensor([0, steps - 1])
        terms = process.training_losses(model, X_START[:2], t)
        results = [*terms.values(), *process.calc_bpd_loop(model, X_START[:2]).values()]
        for loop in (process.p_sample_loop, process.ddim_sample_loop):
            results.append(loop(model, (2, 3, 4, 4), device="cpu"))
        assert all(value.isfinite().all() for value in results)


def test_eps_where_no_signal_is_left():
    """At ᾱ = 0 the expected x_start is 0 and the noise is x_t itself, whatever eps the network predicts."""
    process = make(betas=get_named_beta_schedule("jsd", 9))
    found = process.predict(X_START, NOISE, 8, clip_denoised=False)
    assert (found.x_start == 0).all()
    assert_close(found.eps, NOISE)


def test_wrong_output_shape():
    """The error for a wrong number of output channels names the variance."""
    for variance, channels in ((RANGE, 3), (FIXED, 6)):
        with refused(variance.name.lower()):
            make(variance=variance).training_losses(constant(torch.zeros(4, channels, 4, 4)), X_START, T)
    with refused("betas"):
        make(betas=[0.1, 1.5])
    with refused("eta"):
        make().ddim_reverse_sample(constant(NOISE), NOISE, T, eta=0.5)


def test_tables_cached_while_sampling_work_in_training():
    """Tables first used under inference_mode do not break a later backward pass."""
    process = make()
    with torch.inference_mode():
        process.p_sample(lambda x, t: x, NOISE, T)
    weight = torch.ones((), requires_grad=True)
    process.training_losses(lambda x, t: weight * x, X_START, T)["loss"].sum().backward()
    assert weight.grad.isfinite()


@pytest.mark.parametrize("log_scale", [-5.0, -2.0, 0.0])
def test_discretized_likelihood(log_scale):
    """The probabilities of all 256 values sum to 1, and each is close to the exact Gaussian's."""
    x = torch.arange(256) / 127.5 - 1
    mean, scale = torch.full_like(x, 0.1), torch.full_like(x, log_scale)
    found = discretized_gaussian_log_likelihood(x, means=mean, log_scales=scale).exp()
    assert found.sum().item() == pytest.approx(1, abs=1e-4)
    exact = Normal(0.1, math.exp(log_scale))
    upper = torch.where(x > 0.999, torch.inf, x + 1 / 255)
    lower = torch.where(x < -0.999, -torch.inf, x - 1 / 255)
    assert_close(found, exact.cdf(upper) - exact.cdf(lower), atol=2e-3, rtol=0)


def test_arguments_of_the_loops_may_be_given_by_position():
    """In Guided-Diffusion's order, with eta the last."""
    process, model, shape = make(), constant(seeded(4, 3, 4, 4, seed=6)), (4, 3, 4, 4)
    torch.manual_seed(0)
    by_name = process.ddim_sample_loop(model, shape, noise=NOISE, device="cpu", eta=0.5)
    torch.manual_seed(0)
    *_, last = process.ddim_sample_loop_progressive(model, shape, NOISE, True, None, None, None, "cpu", False, 0.5)
    assert torch.equal(last["sample"], by_name)
    assert not torch.equal(by_name, process.ddim_sample_loop(model, shape, noise=NOISE, device="cpu"))
