"""timm's gradient scaler, which runs backward and the optimizer's step in one call: the weights of a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from cases import same, task
from sparsam import SAM, FriendlyAscent

try:
    from timm.utils import NativeScaler
except Exception as error:  # a torchvision that does not fit raises no ImportError
    pytest.skip(f"needs timm, which does not import: {error}", allow_module_level=True)

OVERFLOWS = 2
"""In which step the scaled gradient does."""


@pytest.mark.parametrize("ascent", [None, FriendlyAscent()], ids=["SAM", "F-SAM"])
def test_the_recipe_of_the_docs_equals_a_plain_loop(ascent):
    t = task()
    models = t.model, copy.deepcopy(t.model)
    opt, plain = (
        SAM(model.parameters(), torch.optim.SGD, rho=0.3, ascent=ascent, model=model, lr=0.1, momentum=0.9)
        for model in models
    )
    model, reference = models
    scaler = NativeScaler(device="cpu")
    for step in range(5):
        opt.zero_grad()
        scaler(F.cross_entropy(model(t.x), t.y), opt, need_update=False)
        opt.first_step(zero_grad=True, scale=scaler._scaler.get_scale())
        loss = F.cross_entropy(model(t.x), t.y) * (torch.inf if step == OVERFLOWS else 1)
        scaler(loss, opt, clip_grad=0.5, parameters=model.parameters())
        opt.restore()
        if step != OVERFLOWS:
            plain.zero_grad()
            F.cross_entropy(reference(t.x), t.y).backward()
            with plain.perturbed():
                plain.zero_grad()
                F.cross_entropy(reference(t.x), t.y).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            plain.step()
        assert same(list(model.parameters()), list(reference.parameters()))  # a skipped step still moves statistics
    assert opt.steps == 4
