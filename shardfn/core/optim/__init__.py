"""Optimizers over trees of shards: `update` is pure, as in Optax, `step` is fused and donates. Layer 4.

    rule          one algorithm, leaf by leaf: AdamW, SGD, Lion
    transform     changes gradients on their way: `clip_by_global_norm`, `schedule`
    slot          one tensor of state per parameter (`mu`, `nu`, `momentum`), a tree like the parameters'
    group         parameters, by name pattern, with options of their own

Arithmetic is on local shards and communicates nothing; only `global_norm`, and what clips by it, is a collective.
Where parameters lie side by side in memory, with their gradients and state likewise, `step` updates all of them in one
call (`core/storage.py`); slots are allocated so.
Parameters that do not train (`requires_grad=False` in the model, integers) have no state, no update and no decay, and
whatever stands in their gradients is ignored.

[Note: where a derivative flows]
Meta-learning differentiates through `update`. A DTensor's local tensor is outside autograd, so where a leaf carries a
derivative the same arithmetic runs on the DTensors themselves, which is slower and communicates nothing either.
"""
