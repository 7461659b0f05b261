"""AdamW (Loshchilov & Hutter 2019) that starts quickly."""

from __future__ import annotations

import inspect

import torch


class AdamW(torch.optim.AdamW):
    """torch's without the wrappers that leave its methods out of torch.compile: they import torch._dynamo, which takes
    as long as importing torch, and no update is compiled here."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
