"""The list of semantics: what people write, and what koila must do as eager does.

*Gives* `SEMANTICS`: number → what it covers. A test shows a line by `@pytest.mark.semantics("S7")`; a number without a
test fails `tests/structure/test_semantics.py`, and so does a mark with a number that is not here.
"""

from __future__ import annotations

SEMANTICS = {
    # Tensors.
    "S1": "forced exactly where the design says; `repr` shows the value once it is there, `_repr_html_` exists, "
    "neither forces",
    "S2": "in-place operators, slice and mask assignment, `fill_`, `copy_` between real and lazy",
    "S3": "views of views, mutation both ways, `expand`/`as_strided`/`unfold` aliases, `out=`, metadata in-place",
    "S4": "`.to`, `channels_last`, non-contiguous, zero-size and 0-d, complex, bool, integer, bfloat16, float16, "
    "quantised and sparse (may run eagerly, visibly)",
    "S5": "`detach`, `.data`, `requires_grad_`, buffer updates under `no_grad`, `real.data = lazy`, "
    "`real.grad = lazy`, `torch.tensor`/`as_tensor`, factories, `functional_call`",
    "S6": "iteration, indexing by every kind of index, number protocol",
    "S7": "numpy, DLPack, pickle, save/load, deepcopy, workers, pinned and shared memory",
    "S8": "data-dependent shapes and control flow with gradients",
    "S9": "user functions, scripted, traced and compiled submodules, `torch.library` operators",
    # Autograd.
    "S10": "`backward` in all forms",
    "S11": "`autograd.grad` in all forms, double and triple backward, gradcheck and gradgradcheck",
    "S12": "hooks of every kind, before and after use, parametrisations",
    "S13": "custom Functions, checkpoint, `torch.func`, forward AD (eager and visible is allowed)",
    "S14": "frozen, shared, unused, tied parameters",
    "S15": "grad, inference, autocast, GradScaler, anomaly modes",
    # Time.
    "S16": "values held after `backward` and `step`",
    "S17": "`.item()` anywhere",
    "S18": "stale inputs, with both lines and the line of the change where it can be known",
    "S19": "random numbers: every kind of draw, in every layout, once, twice and recomputed, with eager draws, "
    "reseeds, `fork_rng` and loaders between",
    "S20": "threads; Ctrl-C",
    "S21": "optimizers incl. LBFGS, two optimizers, optimizer-in-backward, SAM, EMA, SWA",
    "S22": "100,000 chained operations in time linear in their number; 1,000 steps and 300 programs leave memory flat",
}
