"""GaussianDiffusion: sampling loops, training losses and likelihood under Guided-Diffusion's names; and the same on a
subset of its steps.

Methods, arguments, return keys and numbers are Guided-Diffusion's, including the order in which random numbers are
drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..config import InputError
from .losses import Loss, discretized_gaussian_log_likelihood, is_bound, mean_error, mean_flat, normal_kl
from .parametrization import LossType, ModelMeanType, ModelVarType
from .process import Process
from .samplers import Model, ddim_move, ddim_sigma


class GaussianDiffusion(Process):
    """A diffusion process with its training loss (Ho et al. 2020; Nichol & Dhariwal 2021).

    betas, model_mean_type, model_var_type, rescale_timesteps, constrain_variance: as for ``Process``.
    loss_weighting: SNR [T] → weight [T] of the squared error of eps, such as ``losses.min_snr_weights``; converted to
                    the network's prediction type. It does not apply to the variational term.
    loss_type:      or a function of one's own, see ``losses.Loss``.
    vb_loss_weight: weight of the variational term of a learned variance; None = as in ``LossType``.
    """

    def __init__(
        self,
        *,
        betas,
        model_mean_type: ModelMeanType,
        model_var_type: ModelVarType,
        loss_type: Loss,
        rescale_timesteps: bool = False,
        loss_weighting: Callable[[np.ndarray], np.ndarray] | None = None,
        constrain_variance: bool = False,
        vb_loss_weight: float | None = None,
    ):
        super().__init__(betas, model_mean_type, model_var_type, rescale_timesteps, constrain_variance)
        self.loss_type = loss_type
        if vb_loss_weight is None:
            # T/1000: the sum over all T steps would dominate the error (Nichol & Dhariwal, λ = 0.001).
            vb_loss_weight = 1.0 if loss_type == LossType.MSE else self.num_timesteps / 1000
        self.vb_loss_weight = vb_loss_weight
        self.loss_weights = None
        if loss_weighting is not None:
            if is_bound(loss_type):
                raise InputError(
                    f"loss_weighting is set, but the loss {loss_type.name} has its own weights: leave one of them out"
                )
            # The squared error of each target in units of that of eps at the same x_t.
            eps_per_target = {
                ModelMeanType.EPSILON: 1.0,
                ModelMeanType.START_X: self.snr,
                ModelMeanType.VELOCITY: self.alphas_cumprod,  # SNR / (SNR + 1)
                ModelMeanType.PREVIOUS_X: self.snr / self.posterior_mean_coef1**2,
            }[model_mean_type]
            self.loss_weights = loss_weighting(self.snr) * eps_per_target

    # ------------------------------------------------------------------------------------------------------ guidance

    def condition_mean(self, cond_fn, p_mean_var, x, t, model_kwargs=None) -> Tensor:
        """The mean of x_{t-1} under guidance by ``cond_fn(x, t, **model_kwargs)``, the gradient of log p(y | x_t).

        As in Guided-Diffusion, the gradient is taken at x_t, where Sohl-Dickstein et al. 2015 take it at the mean.
        """
        gradient = cond_fn(x, self._scale_timesteps(t), **(model_kwargs or {}))
        return p_mean_var["mean"].float() + p_mean_var["variance"] * gradient.float()

    def condition_score(self, cond_fn, p_mean_var, x, t, model_kwargs=None) -> dict[str, Tensor]:
        """``p_mean_var`` with the score shifted by the gradient (Song et al. 2021b; Dhariwal & Nichol, algorithm 2)."""
        gradient = cond_fn(x, self._scale_timesteps(t), **(model_kwargs or {}))
        eps = self._predict_eps_from_xstart(x, t, p_mean_var["pred_xstart"])
        eps = eps - (1 - self.at("alphas_cumprod", t, x)).sqrt() * gradient
        x_start = self._predict_xstart_from_eps(x, t, eps)
        return {**p_mean_var, "pred_xstart": x_start, "mean": self.posterior_mean(x_start, x, t)}

    # ------------------------------------------------------------------------------------------------------ sampling

    def p_sample(
        self, model, x, t, clip_denoised=True, denoised_fn=None, cond_fn=None, model_kwargs=None
    ) -> dict[str, Tensor]:
        """A draw of x_{t-1}: "sample" and "pred_xstart". t [N] may differ between samples."""
        out = self.p_mean_variance(model, x, t, clip_denoised, denoised_fn, model_kwargs)
        noise = torch.randn_like(x)
        if cond_fn is not None:
            out["mean"] = self.condition_mean(cond_fn, out, x, t, model_kwargs)
        sample = out["mean"] + _above_zero(t, x) * torch.exp(0.5 * out["log_variance"]) * noise
        return {"sample": sample, "pred_xstart": out["pred_xstart"]}

    def ddim_sample(
        self, model, x, t, clip_denoised=True, denoised_fn=None, cond_fn=None, model_kwargs=None, eta=0.0
    ) -> dict[str, Tensor]:
        """x_{t-1} by DDIM (Song et al. 2021, equation 12): "sample" and "pred_xstart"."""
        out = self.p_mean_variance(model, x, t, clip_denoised, denoised_fn, model_kwargs)
        if cond_fn is not None:
            out = self.condition_score(cond_fn, out, x, t, model_kwargs)
        eps = self._predict_eps_from_xstart(x, t, out["pred_xstart"])
        alpha_bar, alpha_bar_prev = (self.at(name, t, x) for name in ("alphas_cumprod", "alphas_cumprod_prev"))
        sigma = ddim_sigma(alpha_bar, alpha_bar_prev, eta)
        noise = torch.randn_like(x)
        sample = ddim_move(out["pred_xstart"], eps, alpha_bar_prev, sigma) + _above_zero(t, x) * sigma * noise
        return {"sample": sample, "pred_xstart": out["pred_xstart"]}

    def ddim_reverse_sample(
        self, model, x, t, clip_denoised=True, denoised_fn=None, model_kwargs=None, eta=0.0
    ) -> dict[str, Tensor]:
        """x_{t+1} by DDIM backwards, which needs eta 0: "sample" and "pred_xstart"."""
        if eta != 0:
            raise InputError(f"eta is {eta}, but DDIM can be reversed at eta 0 only")
        out = self.p_mean_variance(model, x, t, clip_denoised, denoised_fn, model_kwargs)
        eps = self._predict_eps_from_xstart(x, t, out["pred_xstart"])
        sample = ddim_move(out["pred_xstart"], eps, self.at("alphas_cumprod_next", t, x))
        return {"sample": sample, "pred_xstart": out["pred_xstart"]}

    def p_sample_loop(self, model, shape, *args, **kwargs) -> Tensor:
        """Samples [N, C, …] after all steps of ``p_sample_loop_progressive``, with the same arguments."""
        return _last(self.p_sample_loop_progressive(model, shape, *args, **kwargs))["sample"]

    def p_sample_loop_progressive(
        self,
        model,
        shape,
        noise=None,
        clip_denoised=True,
        denoised_fn=None,
        cond_fn=None,
        model_kwargs=None,
        device=None,
        progress=False,
    ) -> Iterator[dict[str, Tensor]]:
        """The result of ``p_sample`` at each step.

        noise:    x_T; None = drawn.
        device:   where to draw it; None = the model's device.
        progress: whether to show a progress bar.
        """
        arguments = (clip_denoised, denoised_fn, cond_fn, model_kwargs)
        return self._loop(self.p_sample, model, shape, noise, device, progress, arguments)

    def ddim_sample_loop(self, model, shape, *args, **kwargs) -> Tensor:
        """As ``p_sample_loop``, by ``ddim_sample``."""
        return _last(self.ddim_sample_loop_progressive(model, shape, *args, **kwargs))["sample"]

    def ddim_sample_loop_progressive(
        self,
        model,
        shape,
        noise=None,
        clip_denoised=True,
        denoised_fn=None,
        cond_fn=None,
        model_kwargs=None,
        device=None,
        progress=False,
        eta=0.0,
    ) -> Iterator[dict[str, Tensor]]:
        """As ``p_sample_loop_progressive``, by ``ddim_sample``."""
        arguments = (clip_denoised, denoised_fn, cond_fn, model_kwargs, eta)
        return self._loop(self.ddim_sample, model, shape, noise, device, progress, arguments)

    def _loop(self, step, model, shape, noise, device, progress: bool, arguments: tuple) -> Iterator[dict[str, Tensor]]:
        """Calls ``step`` for t = T-1 … 0. Unlike in samplers.py, each sample has its own t, as in ``p_sample``, and
        noise comes from torch's global generator, so that a seed gives Guided-Diffusion's images."""
        device = next(model.parameters()).device if device is None else device
        x = torch.randn(*shape, device=device) if noise is None else noise
        indices: Iterable[int] = range(self.num_timesteps)[::-1]
        if progress:
            from tqdm.auto import tqdm

            indices = tqdm(indices)
        for i in indices:
            with torch.no_grad():
                out = step(model, x, torch.full((shape[0],), i, device=device), *arguments)
            yield out
            x = out["sample"]

    # ------------------------------------------------------------------------------------------------------ training

    @property
    def noisiest(self) -> Process:
        """A process whose last step is at the end of this one."""
        return self

    def target(self, x_start: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """The training target of the steps t [N], of x_start's shape."""
        if self.model_mean_type == ModelMeanType.EPSILON:
            return noise
        if self.model_mean_type == ModelMeanType.VELOCITY:
            return self._velocity(x_start, t, noise)
        if self.model_mean_type == ModelMeanType.PREVIOUS_X:
            return self.posterior_mean(x_start, self.q_sample(x_start, t, noise), t)
        return x_start

    def output(self, model: Model, x_t: Tensor, t: Tensor, model_kwargs=None) -> Tensor:
        """What a network predicts of ``target``, at least float32, without a learned variance."""
        return self._output(model, x_t, t, model_kwargs)[0]

    def _output(self, model: Model, x_t: Tensor, t: Tensor, model_kwargs=None) -> tuple[Tensor, Tensor | None]:
        return self._split(model(x_t, self._scale_timesteps(t), **(model_kwargs or {})), x_t)

    def training_losses(
        self,
        model: Model,
        x_start: Tensor,
        t: Tensor,
        model_kwargs=None,
        noise: Tensor | None = None,
        target: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Named losses [N], at least float32, of the steps t [N]: "loss" is minimized, the others are its terms.

        target: what the network's prediction is compared with; None = ``target`` of x_start and noise. InputError with
            a variational loss, which compares distributions.

        "mse", "l1" or "huber": the unweighted error of the network's prediction, "error" of a function. "vb": the
        variational term of a learned variance in bits per dimension, times ``vb_loss_weight``; its gradient reaches the
        variance only.
        """
        noise = torch.randn_like(x_start) if noise is None else noise
        x_t = self.q_sample(x_start, t, noise)
        if is_bound(self.loss_type):
            if target is not None:
                raise InputError("a variational loss compares distributions, and has no other target than x_start's")
            loss = self._vb_terms_bpd(model, x_start, x_t, t, clip_denoised=False, model_kwargs=model_kwargs)["output"]
            return {"loss": loss * self.num_timesteps if self.loss_type == LossType.RESCALED_KL else loss}

        output, var_values = self._output(model, x_t, t, model_kwargs)
        target = self.target(x_start, t, noise) if target is None else target
        name, loss = mean_error(self.loss_type, output, target)
        terms = {name: loss}
        if self.loss_weights is not None:
            loss = self.at("loss_weights", t, loss) * loss
        if var_values is not None:
            frozen = torch.cat([output.detach(), var_values], dim=1)  # the bound must not train the mean
            bound = self._vb_terms_bpd(lambda *_: frozen, x_start, x_t, t, clip_denoised=False)["output"]
            terms["vb"] = bound * self.vb_loss_weight
            loss = loss + terms["vb"]
        return {"loss": loss, **terms}

    # ---------------------------------------------------------------------------------------------------- likelihood

    def _vb_terms_bpd(self, model, x_start, x_t, t, clip_denoised=True, model_kwargs=None) -> dict[str, Tensor]:
        """Step t's term of the variational bound in bits per dimension: "output" [N], and "pred_xstart".

        At t = 0 it is the negative log-likelihood of the 8-bit x_start, else the KL divergence between the two
        distributions of x_{t-1} (Ho et al. 2020, equation 5).
        """
        true_mean, _, true_log_variance = self.q_posterior_mean_variance(x_start, x_t, t)
        out = self.p_mean_variance(model, x_t, t, clip_denoised, model_kwargs=model_kwargs)
        kl = normal_kl(true_mean, true_log_variance, out["mean"], out["log_variance"])
        nll = -discretized_gaussian_log_likelihood(x_start, means=out["mean"], log_scales=0.5 * out["log_variance"])
        bits = torch.where(t == 0, mean_flat(nll), mean_flat(kl)) / math.log(2)
        return {"output": bits, "pred_xstart": out["pred_xstart"]}

    def _prior_bpd(self, x_start: Tensor) -> Tensor:
        """[N] KL between q(x_T | x_start) and the standard normal distribution, in bits per dimension."""
        t = torch.full((x_start.shape[0],), self.num_timesteps - 1, device=x_start.device)
        mean, _, log_variance = self.q_mean_variance(x_start, t)
        return mean_flat(normal_kl(mean, log_variance, 0.0, 0.0)) / math.log(2)

    def calc_bpd_loop(self, model: Model, x_start: Tensor, clip_denoised=True, model_kwargs=None) -> dict[str, Tensor]:
        """The full variational bound in bits per dimension, with one draw of noise per step.

        "total_bpd" and "prior_bpd" [N]; per step from T-1 down to 0, [N, T]: "vb", and the mean squared errors of
        x_start ("xstart_mse") and eps ("mse").
        """
        terms: dict[str, list[Tensor]] = {"vb": [], "xstart_mse": [], "mse": []}
        for i in reversed(range(self.num_timesteps)):
            t = torch.full((x_start.shape[0],), i, device=x_start.device)
            noise = torch.randn_like(x_start)
            x_t = self.q_sample(x_start, t, noise)
            with torch.no_grad():
                out = self._vb_terms_bpd(model, x_start, x_t, t, clip_denoised, model_kwargs)
            eps = self._predict_eps_from_xstart(x_t, t, out["pred_xstart"])
            terms["vb"].append(out["output"])
            terms["xstart_mse"].append(mean_flat((out["pred_xstart"] - x_start) ** 2))
            terms["mse"].append(mean_flat((eps - noise) ** 2))
        stacked = {name: torch.stack(values, dim=1) for name, values in terms.items()}
        prior = self._prior_bpd(x_start)
        return {"total_bpd": stacked["vb"].sum(dim=1) + prior, "prior_bpd": prior, **stacked}


class SpacedDiffusion(GaussianDiffusion):
    """A process on some steps of another. The model's time input is still that of the original process.

    use_timesteps: the steps to keep, each in 0 … T-1, else InputError.
    kwargs:        arguments of the original process, as for GaussianDiffusion.
    """

    def __init__(self, use_timesteps: Collection[int], **kwargs):
        original = Process(kwargs["betas"], kwargs["model_mean_type"], kwargs["model_var_type"])
        self.use_timesteps = set(use_timesteps)
        self.original_num_steps = original.num_timesteps
        self.timestep_map = sorted(self.use_timesteps)
        if not self.use_timesteps or not self.use_timesteps <= set(range(self.original_num_steps)):
            raise InputError(f"the steps to keep must be some of 0 to {self.original_num_steps - 1}")
        self._settings = kwargs
        kept = original.alphas_cumprod[self.timestep_map]
        super().__init__(**{**kwargs, "betas": 1 - kept / np.append(1.0, kept[:-1])})

    def truncated(self, count: int) -> SpacedDiffusion:
        return SpacedDiffusion(self.timestep_map[:count], **self._settings)

    def fraction(self, t: int) -> float:
        return self.timestep_map[t] / self.original_num_steps

    def _scale_timesteps(self, t: Tensor) -> Tensor:
        t = self._table("timestep_map", t.device)[t]
        return t.float() * (1000.0 / self.original_num_steps) if self.rescale_timesteps else t


def _above_zero(t: Tensor, x: Tensor) -> Tensor:
    """1 at steps that add noise, 0 at t = 0; [N, 1, …]."""
    return (t != 0).float().view(-1, *[1] * (x.dim() - 1))


def _last(steps: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    for out in steps:
        final = out
    return final
