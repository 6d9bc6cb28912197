"""`Trainer`, the only stateful object: it holds what the functions are given.

It adds no numerics: `step` is `value_and_grad`, `clip` and the optimizer's `step` on the same trees.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfn import _torch, optim, watch
from shardfn._torch import IncompatibleKeys, buffers_of, children_of, parameters_of, pytree, set_tables, unwrap_local
from shardfn.comm import agree, exchange_numbers, failing_together, require_own_part
from shardfn.context import having
from shardfn.layout import Plan, Policy, make_mesh, planning
from shardfn.notation import ShardError, see
from shardfn.params import Params, initialize, map_local, parts_of, sharding, state_dicts
from shardfn.stateful import saved_state, settings, step_losses
from shardfn.stateful.module_shards import adopt, install, require_no_gradients, taken_over, whole_in_place
from shardfn.stateful.progress import Clock
from shardfn.stateful.torch_optimizers import DRIVERS, refuse_held_back
from shardfn.transforms import autodiff


class Trainer(nn.Module):
    """A sharded model that trains: an `nn.Module` whose parameters are shards, and, given a loss, a training loop.

    It takes the model over: its parameters become `nn.Parameter(DTensor)` shards in place, under the same names. So any
    `torch.optim` optimizer, learning-rate schedule, `state_dict` and torch.distributed.checkpoint work on it, and
    `trainer(x)` followed by `loss.backward()` fills `.grad` with gradients averaged over the data axes.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 1)
        >>> def loss_fn(params, x, y):
        ...     return (sf.apply(model, params, x) - y).square().mean()
        >>> trainer = sf.Trainer(model, sf.make_mesh("cpu", fsdp=1), optimizer=sf.optim.adamw(1e-2), loss_fn=loss_fn)
        >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
        >>> losses = [float(trainer.step(x, y)["loss"]) for _ in range(20)]
        >>> losses[-1] < losses[0]
        True

    Args:
        model: the module; may be on the meta device when `init` is given.
        mesh: default `make_mesh(fsdp=-1)`.
        policy: default `Policy()`.
        optimizer: from `sf.optim`; needed by `step`.
        loss_fn: `loss_fn(params, *batch)` as for `value_and_grad`; needed by `step` and `evaluate`.
        accumulate: microbatches a step: `step` cuts its batch on dim 0 into so many equal parts.
        clip: largest global norm of the gradients.
        ema: decay of an exponential moving average of the parameters, kept in `trainer.ema`.
        scaler: a `torch.amp.GradScaler`, for float16: losses are scaled, and a step whose gradients are not finite
            changes nothing but the scale.
        nonfinite: what a step does whose loss or gradients are not finite, on all ranks if it is so on one: `"raise"`
            an error that names the ranks, `"skip"` the update, or nothing (None). Either way nothing changes but the
            buffers; a scaler skips by itself.
        callbacks: each is called after every step with the trainer and what `step` returns.
        compile: compiles the forward of every unit, or says how: `Policy(compile=...)` for a policy without it.
        init: as for `shard`.
        src: as for `shard`.
        params: a tree of this model, by `sf.checkpoint.load_safetensors` for example, to begin with. The trainer takes
            it over: steps write into these tensors. Where `mesh` or `policy` is left out, those of the tree count. The
            model's own values do not: it may be on the meta device.
        resume: where the checkpoints of this run are: `load` of the newest one, if there is one. When SIGTERM comes to
            a rank, all save there after the same step, with what `save` was given last, and end with status 75.

    Raises:
        ShardError: as `shard`; `params` that are not laid out as `shard` would lay them out.
        ValueError, TypeError: a setting that means nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh | None = None,
        policy: Policy | Plan | None = None,
        *,
        optimizer: optim.Optimizer | None = None,
        loss_fn: Callable[..., Any] | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        ema: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        nonfinite: Literal["raise", "skip"] | None = "raise",
        callbacks: Sequence[Callable[["Trainer", dict[str, Any]], object]] = (),
        compile: bool | Mapping[str, Any] = False,
        init: Callable[[Any], Any] | None = None,
        src: int | None = None,
        params: Params | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        settings.check_settings(model, optimizer, accumulate, clip, ema, scaler)
        if nonfinite not in ("raise", "skip", None):
            raise ValueError(f"Trainer(nonfinite={nonfinite!r}): 'raise', 'skip' or None")
        self.callbacks = list(callbacks if isinstance(callbacks, Iterable) else [callbacks])
        if odd := [callback for callback in self.callbacks if not callable(callback)]:
            why = f"Trainer(callbacks=[{odd[0]!r}]): a function of the trainer and what its step returns"
            raise see(TypeError(why), "trainer")
        if params is None:
            mesh = mesh if mesh is not None else make_mesh(fsdp=-1)
            watch.watch_for(self, mesh)
            params = sharding.shard(model, mesh, settings.compiling(policy, compile), init=init, src=src)
        else:
            if not isinstance(params, Params):
                kind = type(params).__name__
                raise TypeError(f"Trainer(params={kind}): expected a tree made by shard or load_safetensors")
            if init is not None or src is not None:
                raise ValueError("Trainer(params=...): the tree has all values; leave out init and src")
            policy = settings.compiling(policy if policy is not None else params.plan.policy, compile)
            params = taken_over(model, mesh if mesh is not None else params.mesh, policy, params)
        self.plan, self.mesh = params.plan, params.mesh
        watch.watch_for(self, self.mesh)
        self.optimizer, self.loss_fn = optimizer, loss_fn
        self.accumulate, self.clip, self.ema_decay = accumulate, clip, ema
        self.nonfinite = nonfinite
        # Where it saves when it has to end, and what.
        self._resumes = None if resume is None else (resume, dict[str, Any]())
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.steps = self._samples = self._own_samples = 0
        self._syncs = True
        self._clock = Clock()
        # The trainer shares the model's tables of children, parameters and buffers, so that names carry no prefix.
        self.__dict__["_model"] = model
        self._held = install(model, params)
        set_tables(self, parameters=parameters_of(model), buffers=buffers_of(model), modules=children_of(model))
        self.training = model.training
        self._differentiates = self._is_whole = False
        model.register_load_state_dict_pre_hook(_require_own_parts)
        DRIVERS[self] = None
        self.ema: Params | None = map_local(lambda x: x.detach().clone(), self.params) if ema is not None else None
        self.optimizer_state: Any = optimizer.init(self.params) if optimizer is not None else None
        if resume is not None:
            watch.asked_to_stop(self.mesh)  # from now on
        if resume is not None and (found := saved_state.found_in(self.mesh, "Trainer(resume=...)", resume)):
            self._go_on(found, {})

    def __setattr__(self, name: str, value: Any) -> None:
        """Its own attributes are not the model's, whose children and buffers may have the same names."""
        if isinstance(getattr(type(self), name, None), property):
            raise ShardError(f"Trainer.{name} is not assigned to: write trainer.load_state_dict(params)")
        self.__dict__[name] = value

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """`to()`, `half()` and the like: a plan is made for the dtypes that parameters then have."""
        self.module._apply(*args, **kwargs)
        if not self._held.fits:
            self.plan = planning.plan(self.module, self.mesh, self.plan.policy)
            self._held = adopt(self.module, self.plan, self.mesh)
        return self

    @property
    def module(self) -> nn.Module:
        """The model; its parameters are the shards."""
        return self.__dict__["_model"]

    @property
    def params(self) -> Params:
        """The parameters as a tree, for every function of shardfn; the leaves are the `nn.Parameter`s themselves."""
        return self._held.params()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`apply(module, params, ...)`; in `summon_full_params` the module's own, with the whole parameters there.

        Raises:
            ShardError: in `step`, whose `loss_fn` must use the parameters that it is given.
        """
        if self._differentiates:
            why = "Trainer.step: loss_fn called the trainer, whose parameters are not those that are differentiated"
            raise ShardError(f"{why}. Use the ones it is given: sf.apply(trainer.module, params, ...)")
        method = kwargs.pop("method", None) or "__call__"
        if self._is_whole:
            return self._held.run(self.module, None, method, args, kwargs)
        params = self._held.params(holds_back=lambda unit: not self._syncs)
        with watch.call(self.mesh, "run the forward"):
            return self._held.run(self.module, params, method, args, kwargs)

    def step(self, *batch: Any) -> dict[str, Any]:
        """One update on this data rank's batch.

        Returns:
            `loss` (averaged over data ranks) and `grad_norm` (before clipping) as scalar tensors; `tokens`, elements of
            the last tensor of the batch, summed over data ranks; `lr`, the learning rate of this update, None for an
            optimizer that has none; `seconds` since the end of the step before; with a scaler `scale`, by which this
            loss was scaled.

        Raises:
            ShardError: no optimizer or loss_fn; a batch that does not divide into `accumulate` parts; a parameter that
                was frozen, or is no longer, since the model was sharded; it is recorded, by `sf.jit`.
        """
        if _torch.has_no_memory():
            raise ShardError("Trainer.step: in sf.jit its counts would stand still; write Policy(compile=True) instead")
        optimizer = self._require("optimizer", self.optimizer)
        self._clock.begin()
        with watch.call(self.mesh, f"do step {self.steps}"):
            out = self._step(optimizer, batch)
        out["seconds"] = self._clock.seconds()
        self.steps += 1
        self._own_samples += _samples_in(batch)
        for callback in self.callbacks:
            callback(self, out)
        self._stop_if_asked()
        return out

    def _stop_if_asked(self) -> None:
        """When SIGTERM came to a rank, all save where they would resume, and end.

        Raises:
            Stopped: a `SystemExit` with status 75.
        """
        if self._resumes is None or not watch.asked_to_stop(self.mesh):
            return
        directory, saved_with = self._resumes
        path = self.save(directory, **saved_with)
        if torch.distributed.get_rank() == 0:
            others = any(one is not self and getattr(one, "_resumes", None) is not None for one in DRIVERS)
            more = (
                "; other Trainers with resume= were not: save them together, by sf.collectives.asked_to_stop" * others
            )
            status = watch.Stopped.STATUS
            print(f"Trainer: SIGTERM came; saved '{path}', and all ranks end with status {status}{more}", flush=True)
        raise watch.Stopped

    def _step(self, optimizer: optim.Optimizer, batch: tuple[Any, ...]) -> dict[str, Any]:
        params = self.params
        settings.require_flags(params)
        self._held.lend(params)
        count = self.accumulate
        part = parts_of("Trainer.step", batch, count, f"cut into accumulate={count} parts") if count > 1 else None
        parts = [batch] if part is None else [*map(part, range(count))]
        of_rank: list[Any] = []
        with having(self, _differentiates=True), torch.no_grad():  # nobody differentiates the gradients
            loss, grads = self._loss_and_grads(params, parts, of_rank)
        rate = None if optimizer.rate is None else float(optimizer.rate(self.optimizer_state))
        out = {"loss": loss, "grad_norm": None, "tokens": self._tokens(batch), "lr": rate}
        if self.scaler is not None:
            out["scale"] = self.scaler.get_scale()
            out["loss"], grads = step_losses.scaled(loss, grads, torch.tensor(1 / out["scale"], dtype=torch.float64))
        grads, norm = optim.clip(grads, self.clip) if self.clip is not None else (grads, optim.global_norm(grads))
        out["grad_norm"] = norm
        if self.scaler is None and self.nonfinite is not None:
            takes = step_losses.is_finite(out["loss"], norm, params)
        else:
            takes = self.scaler is None or step_losses.advance(self.scaler, norm)
        if not takes and self.scaler is None and self.nonfinite == "raise":
            raise step_losses.not_finite(self.mesh, self.steps, of_rank)
        self._held.keep_buffers(self.module, params.buffers)
        if takes:
            _, self.optimizer_state = optimizer.step(params, grads, self.optimizer_state)
            self._update_ema(params)
        return out

    def _loss_and_grads(
        self, params: Params, parts: Sequence[tuple[Any, ...]], of_rank: list[Any]
    ) -> tuple[Tensor, Params]:
        """Means over microbatches, each weighted by what its `Mean` counted, or all alike.

        Those of this rank go into `of_rank`.
        """
        loss_fn = self._require("loss_fn", self.loss_fn)
        differentiate = autodiff.differentiator(step_losses.scaling(loss_fn, self.scaler, of_rank))
        sums: tuple[Tensor, Params, Tensor] | None = None
        for part in parts:
            loss, _, grads, count = differentiate(params, *part)
            if len(parts) == 1:
                return loss, grads
            weight = step_losses.weight(count)
            loss, grads = step_losses.scaled(loss, grads, weight)
            if sums is not None:
                loss, grads, weight = sums[0] + loss, map_local(torch.add, sums[1], grads), sums[2] + weight
            sums = loss, grads, weight
        assert sums is not None
        return step_losses.scaled(sums[0], sums[1], 1 / sums[2])

    @torch.no_grad()
    def evaluate(self, *batch: Any) -> dict[str, Any]:
        """The loss of this data rank's batch, averaged over data ranks, without an update; dropout is off meanwhile.

        All ranks have to call it.

        Returns:
            `loss`, a scalar tensor, and `tokens`, as of `step`.
        """
        return self._evaluate(batch)[0]

    @torch.no_grad()
    def evaluate_all(self, batches: Iterable[Any]) -> dict[str, Any]:
        """The mean loss over all batches of a loader: `evaluate` of each, weighted by what it counts.

        Exact for a `loss_fn` that returns `sf.data.Mean`; others count by samples. All ranks have to call it, with as
        many batches each.

        Args:
            batches: a `DataLoader` of this data rank's batches, or any iterable; a tuple or list is the arguments of
                `loss_fn` after the parameters, anything else the only one.

        Returns:
            `loss`, a scalar tensor; `tokens` and `batches`, how many there were.

        Raises:
            ShardError: there is no batch.
        """
        found = [self._evaluate(tuple(x) if isinstance(x, tuple | list) else (x,)) for x in batches]
        if not found:
            raise ShardError("Trainer.evaluate_all: there is no batch; an iterator can be gone through once only")
        total = torch.stack([out["loss"].double() * weight for out, weight in found]).sum()
        loss = total / sum(weight for _, weight in found)
        tokens = sum(out["tokens"] for out, _ in found)
        return {"loss": loss.to(found[0][0]["loss"].dtype), "tokens": tokens, "batches": len(found)}

    def _evaluate(self, batch: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
        """What `evaluate` returns, and how much that counts beside other batches."""
        loss_fn = self._require("loss_fn", self.loss_fn)
        self._clock.pause()
        with ExitStack() as modes:
            modes.enter_context(watch.call(self.mesh, "evaluate"))
            for module in (self, *self.module.modules()):
                modes.callback(setattr, module, "training", module.training)
            self.eval()
            params = self.params
            self._held.lend(params)
            with autodiff.explained("Trainer.evaluate"):
                loss = loss_fn(params, *batch)
            value, count = autodiff.value_of(loss, self.params)
        self._stop_if_asked()
        return {"loss": value, "tokens": self._tokens(batch)}, _samples_in(batch) if count is None else count

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        async_: bool = False,
        **others: Any,
    ) -> Any:
        """Write `directory/step-00000012` after 12 steps: parameters, buffers, optimizer state, average, step count.

        And where the generators of random numbers are of each rank, which go on from there on as many ranks.

        Steps of a torch optimizer of these parameters count, those of the first one that steps. Buffers are those of
        the first rank.

        Args:
            directory: where the checkpoints of a run are; the same on all ranks. One of this step is replaced. Or a
                `sf.checkpoint.LocalDirectory` of each rank: what they hold together is the checkpoint.
            keep: how many of the newest finished checkpoints there stay, this one among them; default: all.
            keep_every: those whose step is a multiple of it stay, too.
            async_: whether it goes on in the background; see `sf.checkpoint.save`.
            **others: more to save, by a name of yours: anything with `state_dict()` and `load_state_dict()`, as a torch
                optimizer of `trainer.parameters()`, a learning-rate schedule, a gradient scaler.

        The scaler goes with them, as `scaler`. A state that is not the same on all ranks, as that of a loader, is of
        each rank, and goes on on as many.

        Returns:
            the new checkpoint's path; with `async_` a `sf.checkpoint.Saving`, whose `wait()` returns it.

        Communication: see `sf.checkpoint.save`.
        """
        self._clock.pause()
        if self._resumes is not None:
            self._resumes = self._resumes[0], {"keep": keep, "keep_every": keep_every, **others}
        with watch.call(self.mesh, "save"):
            counts = exchange_numbers(self.mesh, [self._own_samples])
            self._samples += sum(count for (count,) in counts) * self._data_ranks // len(counts)
            self._own_samples = 0
            what = self._saved(), self._with_scaler(others)
            return saved_state.save(self.mesh, *what, directory, (keep, keep_every), async_)

    def load(self, directory: str | os.PathLike[str], **others: Any) -> Path:
        """Go on from a checkpoint, or from the newest one in a directory; any mesh and policy may have written it.

        Nothing of the trainer changes unless everything was read, and `others` have taken their states.

        Args:
            directory: a checkpoint, or where those of a run are: the newest one that is not damaged counts.
            **others: what `save` was given, under the same names.

        Returns:
            the path that was read.

        Raises:
            FileNotFoundError: there is none.
            ShardError: it is of another model or optimizer.
        """
        with watch.call(self.mesh, "load"):
            found = saved_state.found_in(self.mesh, "Trainer.load", directory)
            if not found:
                raise FileNotFoundError(f"Trainer.load: no checkpoint in '{directory}'")
            return self._go_on(found, others)

    def _go_on(self, found: Sequence[Path], others: Mapping[str, Any]) -> Path:
        """Go on from the first of some checkpoints that is not damaged."""
        path, state = saved_state.load(self.mesh, self._saved(), self._with_scaler(others), found)
        self._held.copy_in(state["params"])
        for name, buffer in self.module.named_buffers():
            buffer.copy_(state["buffers"][name])
        self.optimizer_state, self.ema, self.steps = state["optimizer"], state["ema"], state["steps"]
        self._samples, self._own_samples = state["samples"], 0
        return path

    def _saved(self) -> dict[str, Any]:
        """What a checkpoint has of it, besides where generators are."""
        state = {"params": self.params, "buffers": dict(self.module.named_buffers()), "optimizer": self.optimizer_state}
        return state | {"ema": self.ema, "steps": self.steps, "samples": self.samples}

    def _with_scaler(self, others: Mapping[str, Any]) -> dict[str, Any]:
        if self.scaler is not None and others.get("scaler", self.scaler) is not self.scaler:
            raise ShardError("Trainer: scaler= is not that of Trainer(scaler=...), which is saved; leave it out")
        return {**({} if self.scaler is None else {"scaler": self.scaler}), **others}

    @property
    def samples(self) -> int:
        """How many samples the steps have had, on all data ranks: dim 0 of the last tensor of each batch.

        As many on each data rank as on this one since the last `save`, which counts them. After `load` the data go on
        from there.
        """
        return self._samples + self._own_samples * self._data_ranks

    @property
    def _data_ranks(self) -> int:
        return prod(self.plan.axes[axis] for axis in self.plan.roles.data)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state dict: `DTensor` shards and buffers under the model's names, in the model's shapes."""
        state = self.module.state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        special = [layout for layout in self.plan.layouts.values() if not layout.plain]
        shaped = state_dicts.to_state_dict(self.params) if special else {}
        for layout in special:
            for leaf, name in product(layout.leaves, layout.names):
                state.pop(prefix + name + leaf.name.removeprefix(layout.name), None)
            state |= {prefix + name: shaped[name].detach() for name in layout.names}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy in tensors under the model's names: full ones, or `DTensor`s of any layout on this mesh.

        Args:
            state_dict: name -> tensor; or a tree of this model in any layout on this mesh, with its buffers.
            strict: whether missing and unexpected names are an error.
            assign: not supported, the parameters stay the same objects.

        Raises:
            ShardError: with `strict`, the names that do not fit; shapes that do not fit; on every rank. Ranks that give
                other values.

        Communication: two small exchanges over the mesh; one gather for each `DTensor` of another layout.
        """
        with failing_together(self.mesh, "Trainer.load_state_dict"):
            state_dict, found = self._checked(state_dict, strict, assign)
        whole = ((n, x) for n, x in state_dict.items() if n in self.plan.canonical and not isinstance(x, DTensor))
        facts = [f"'{name}' in the state dict with values {initialize.sampled(x)}" for name, x in whole]
        agree(self.mesh, self.plan, facts, "Trainer.load_state_dict")
        self._held.copy_in(state_dicts.from_state_dict(self.params, state_dict))
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if name in state_dict:
                buffer.copy_(state_dict[name])
        return found

    def _checked(
        self, state_dict: Mapping[str, Any], strict: bool, assign: bool
    ) -> tuple[Mapping[str, Any], IncompatibleKeys]:
        """A state dict by the model's names, and those that are missing and unexpected.

        Raises:
            ShardError: it does not fit.
        """
        if assign:
            raise ShardError("Trainer.load_state_dict: assign=True would replace the shards; leave it out")
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        names = {name.replace(planning.WRAPPER, ""): name for name in (*self.plan.canonical, *buffers)}
        saved = self.module.state_dict().keys()
        wanted = self.plan.canonical.keys() | {
            name for bare, name in names.items() if name in buffers and bare in saved
        }
        if isinstance(state_dict, Params):  # whose leaves may have other shapes than the model's
            kept = {name: value for name, value in state_dict.buffers.items() if name in wanted}
            state_dict = state_dicts.to_state_dict(state_dict) | kept
        state_dict = {names.get(name, name): value for name, value in state_dict.items()}
        layouts = [x for x in self.plan.layouts.values() if any(name in state_dict for name in x.names)]
        missing = sorted(wanted - {name for layout in layouts for name in layout.names} - set(state_dict))
        unexpected = sorted(set(state_dict) - wanted)
        if strict and (missing or unexpected):
            why = f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            instead = "every rank must give all of it, or pass strict=False"
            prefix = unexpected[0].removesuffix(missing[0]) if missing and unexpected else ""
            if unexpected == [prefix + name for name in missing]:
                instead = f"pass {{name.removeprefix({prefix!r}): x for name, x in state_dict.items()}}"
            prefix = missing[0].removesuffix(unexpected[0]) if missing and unexpected else ""
            if prefix and missing == [prefix + name for name in unexpected]:
                instead = f"pass {{{prefix!r} + name: x for name, x in state_dict.items()}}"
            raise see(ShardError(f"Trainer.load_state_dict: {why}; {instead}"), "trainer")
        for layout in layouts:
            value = next(state_dict[name] for name in layout.names if name in state_dict)
            _require_shape(f"'{layout.name}'", value, layout.shape)
        for name in buffers.keys() & state_dict.keys():
            _require_shape(f"buffer '{name}'", state_dict[name], tuple(buffers[name].shape))
        return state_dict, IncompatibleKeys(missing, unexpected)

    def train(self, mode: bool = True) -> "Trainer":
        """Training mode of the trainer and the module."""
        self.training = mode
        self.module.train(mode)
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, `backward()` adds up gradients on each rank; the first one after it reduces them all.

        Until then `.grad` is a `DTensor` of partial sums, whole on every rank: more memory, for less traffic.
        """
        return having(self, _syncs=False)

    @contextmanager
    def summon_full_params(self, writeback: bool = True) -> Iterator[None]:
        """Within it, the module holds full, ordinary parameters; changes are cut into shards again unless not wanted.

        Args:
            writeback: whether changes count.

        Raises:
            ShardError: a backward within it, whose gradients are those of one rank.

        Communication: one all-gather a bucket and axis on entry.
        """
        full = sharding.gather(self.params)
        values = {name: full[name].detach().clone() for name in self.plan.layouts}
        with having(self, _is_whole=True), whole_in_place(self.module, values, self._held) as whole:
            yield
        require_no_gradients(whole)
        if writeback:
            now = {name: value.detach() for name, value in whole.items()}
            self._held.copy_in(state_dicts.from_state_dict(self.params, now))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the `.grad`s in place to a global norm of at most `max_norm`; returns the norm before.

        Raises:
            ShardError: gradients that were added up under `no_sync()` and not reduced.

        Communication: one all-reduce of a scalar for each mesh axis.
        """
        grads = self.params.like((name, leaf.grad) for name, leaf in self.params.items() if leaf.grad is not None)
        for name, grad in grads.items():
            refuse_held_back("Trainer.clip_grad_norm_", [grad], f"the gradient of '{name}'")
        clipped, norm = optim.clip(dict(grads), max_norm)  # also of what was thawed since
        for name, leaf in grads.items():
            unwrap_local(leaf).copy_(unwrap_local(clipped[name]))
        return norm

    def _require(self, what: str, value: Any) -> Any:
        if value is None:
            raise ShardError(f"Trainer: there is no {what}; pass Trainer(..., {what}=...)")
        return value

    def _tokens(self, batch: Any) -> int:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        return tensors[-1].numel() * self._data_ranks if tensors else 0

    @torch.no_grad()
    def _update_ema(self, params: Params) -> None:
        if self.ema is None or self.ema_decay is None:
            return
        for name, average in self.ema.items():
            if average.is_floating_point():
                unwrap_local(average).lerp_(unwrap_local(params[name]).detach(), 1 - self.ema_decay)


def _samples_in(batch: Any) -> int:
    """How many samples a batch of this rank has."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return len(tensors[-1]) if tensors else 0


def _require_own_parts(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    """What `trainer.module.load_state_dict` copies must be this rank's parts.

    Raises:
        ShardError: they are another rank's.
    """
    ranks = list(range(torch.distributed.get_world_size()))
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            require_own_part(f"load_state_dict: '{name}'", value, ranks)


def _require_shape(what: str, value: object, shape: tuple[int, ...]) -> None:
    actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if actual != shape:
        raise ShardError(f"Trainer.load_state_dict: {what} is {actual}, the model has {shape}")
