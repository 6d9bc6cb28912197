"""Ways in which ranks of a training run go apart, as trackers have them, and healthy runs that only look like it.

A way is a function of a `Run` that every rank calls before each step. On one rank, at one step, it does what the others
do not.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scripts import note_fault
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import shardfn as sf

BAD, AT, STEPS = 1, 5, 1000
POLICY = sf.Policy(rules={"blocks.*.up.weight": "h@tp c", "blocks.*.up.bias": "h@tp", "blocks.*.down.weight": "c h@tp"})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks in an order that may be changed, with something that may happen at each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = [0, 1, 2]
        self.at_block: Callable[[int], Any] = lambda i: None
        self.on_output: Callable[[Tensor], Tensor] = lambda out: out

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            self.at_block(i)
            x = self.blocks[i](x)
        return self.on_output(x)


class Skip(Exception):
    """This rank leaves the step out."""


@dataclass
class Run:
    """A training run of one rank, and what may be done to it."""

    mesh: DeviceMesh
    model: Any  # the `Net`
    folder: Path
    train: Callable[[Tensor, Tensor], Any] = print
    evaluate: Callable[[Tensor, Tensor], Any] = print
    save: Callable[[Path], Any] = print
    scope: ExitStack = field(default_factory=ExitStack)
    trainer: Any = None
    optimizer: Any = None
    skips_optimizer: bool = False
    step: int = 0
    samples: int = 0  # which are shifted by so many
    catches: bool = False
    hits: int = 0

    @property
    def hit(self) -> bool:
        """Whether this rank goes apart now."""
        now = dist.get_rank() == BAD and self.step == AT
        if now and not self.hits:
            note_fault()
        self.hits += now
        return now

    def batch(self) -> tuple[Tensor, Tensor]:
        """Of this data rank."""
        seed = 1000 * (self.step + self.samples) + sf.data.rank(self.mesh)[0]
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        return x, x.sin()


def trained_by_trainer(run: Run, policy: sf.Policy, **settings: Any) -> None:
    """`Trainer.step`."""

    def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (sf.apply(run.model, params, x) - y).square().mean()

    run.trainer = sf.Trainer(run.model, run.mesh, policy, optimizer=sf.optim.adamw(1e-3), loss_fn=loss_fn, **settings)
    run.train, run.evaluate, run.save = run.trainer.step, run.trainer.evaluate, run.trainer.save


def trained_by_backward(run: Run, model: Any) -> None:
    """What all classes have: a call, `backward()`, a torch optimizer."""
    run.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(x: Tensor, y: Tensor) -> None:
        (model(x) - y).square().mean().backward()
        if not run.skips_optimizer:
            run.optimizer.step()
        run.optimizer.zero_grad()

    def evaluate(x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            model(x)

    run.train, run.evaluate = train, evaluate


def trained_by_module(run: Run, policy: sf.Policy) -> None:
    """`trainer(x)`."""
    run.trainer = sf.Trainer(run.model, run.mesh, policy)
    trained_by_backward(run, run.trainer)
    run.save = run.trainer.save


def trained_by_fsdp2(run: Run, policy: sf.Policy) -> None:
    """`fully_shard`, on a mesh without `tp`."""
    from shardfn.compat.fsdp2 import fully_shard

    for block in run.model.blocks:
        fully_shard(block, mesh=run.mesh)
    trained_by_backward(run, fully_shard(run.model, mesh=run.mesh))
    run.save = lambda folder: sf.checkpoint.save(folder, dict(run.model.named_parameters()))


def trained_by_functions(run: Run, policy: sf.Policy) -> None:
    """`value_and_grad` and an optimizer of trees, in `watch`."""
    params, optimizer = sf.shard(run.model, run.mesh, policy), sf.optim.adamw(1e-3)
    run.scope.enter_context(sf.collectives.watch(run.mesh))
    state = optimizer.init(params)

    def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (sf.apply(run.model, params, x) - y).square().mean()

    def train(x: Tensor, y: Tensor) -> None:
        nonlocal params, state
        _, grads = sf.value_and_grad(loss_fn)(params, x, y)
        params, state = optimizer.step(params, grads, state)

    run.train = train
    run.evaluate = lambda x, y: loss_fn(params, x, y)
    run.save = lambda folder: sf.checkpoint.save(folder, {"params": params})


APIS: Mapping[str, Callable[..., None]] = {
    "trainer": trained_by_trainer,
    "module": trained_by_module,
    "fsdp2": trained_by_fsdp2,
    "functions": trained_by_functions,
}


def main(rank: int, way: Callable[[Run], Any], api: str, axes: Mapping[str, int], steps: int, seconds: float) -> None:
    """The script: train, and let something happen before each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = sf.make_mesh("cpu", timeout=seconds, **axes)
    run = Run(mesh, Net(), Path(os.environ["FAULT"]).parent)
    APIS[api](run, POLICY if "tp" in axes else sf.Policy())
    with run.scope:
        for run.step in range(steps):
            try:
                way(run)
                run.train(*run.batch())
            except Skip:
                continue
            except ValueError as error:
                if not run.catches or isinstance(error, sf.ShardError):
                    raise
            time.sleep(0.02)
    print("finished", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Ways to go apart


def skips_a_sample(run: Run) -> None:
    if run.hit:
        run.samples = 1


def has_no_more_batches(run: Run) -> None:
    if run.hit:
        sys.exit(0)


def leaves_a_step_out(run: Run) -> None:
    if run.hit:
        raise Skip


def stops_early_and_saves(run: Run) -> None:
    if run.hit:
        run.save(run.folder / "best")


def calls_units_in_another_order(run: Run) -> None:
    if run.hit:
        run.model.order = [1, 0, 2]


def leaves_a_unit_out(run: Run) -> None:
    if run.hit:
        run.model.order = [0, 2]


def raises_in_forward(run: Run) -> None:
    run.catches = True
    run.model.at_block = _raising if run.hit else lambda i: None


def _raising(i: int) -> None:
    if i == 1:
        raise ValueError("no valid anchors")


def raises_in_backward(run: Run) -> None:
    run.catches = True
    run.model.on_output = _hooked if run.hit else lambda out: out


def _hooked(out: Tensor) -> Tensor:
    def fails(grad: Tensor) -> None:
        raise ValueError("out of memory")

    if out.requires_grad:
        out.register_hook(fails)
    return out


def raises_and_waits(run: Run) -> None:
    if run.hit:
        run.model.at_block = _raising
        try:
            run.train(*run.batch())
        except ValueError:
            time.sleep(600)


def raises_in_backward_and_waits(run: Run) -> None:
    if run.hit:
        run.model.on_output = _hooked
        try:
            run.train(*run.batch())
        except ValueError:
            time.sleep(600)


def raises_in_its_loader(run: Run) -> None:
    if run.hit:
        raise KeyError("sample 17")


def raises_in_the_optimizer(run: Run) -> None:
    run.catches = True
    if run.hit:
        optimizer = run.optimizer

        def fails(*args: Any) -> None:
            handle.remove()
            raise ValueError("no state")

        handle = optimizer.register_step_pre_hook(fails)


def skips_the_optimizer(run: Run) -> None:
    run.skips_optimizer = run.hit


def has_another_rate(run: Run) -> None:
    if run.hit:
        run.optimizer.param_groups[0]["lr"] = 0.5


def saves_alone(run: Run) -> None:
    if run.hit:
        run.save(run.folder / "alone")


def gathers_alone(run: Run) -> None:
    if run.hit:
        run.trainer.summon_full_params().__enter__()


def evaluates_alone(run: Run) -> None:
    if run.hit:
        run.evaluate(*run.batch())


def waits_at_a_barrier(run: Run) -> None:
    if run.hit:
        dist.barrier()


def adds_up_alone(run: Run) -> None:
    if run.hit:
        dist.all_reduce(torch.ones(3))


def has_another_batch(run: Run) -> None:
    if run.hit:
        run.samples = 500


def draws_a_number(run: Run) -> None:
    if run.hit:
        torch.rand(1)


def holds_gradients_back(run: Run) -> None:
    if run.hit:
        with run.trainer.no_sync():
            run.train(*run.batch())
        raise Skip


def has_a_nan(run: Run) -> None:
    run.model.on_output = (lambda out: out * float("nan")) if run.hit else lambda out: out


def went_back_a_few_steps(run: Run) -> None:
    if run.hit:
        for state in run.optimizer.state.values():
            state["step"] -= 3


def is_killed(run: Run) -> None:
    if run.hit:
        os.kill(os.getpid(), signal.SIGKILL)


def is_stopped(run: Run) -> None:
    if run.hit:
        os.kill(os.getpid(), signal.SIGSTOP)


@dataclass(frozen=True)
class Way:
    """One, and where it is known from."""

    do: Callable[[Run], Any]
    source: str
    api: str = "trainer"
    axes: Mapping[str, int] = field(default_factory=lambda: {"fsdp": 2, "tp": 2})
    says: str = "rank 1 ("  # in the error, beside where all ranks are

    @property
    def name(self) -> str:
        """For a test."""
        return f"{self.do.__name__}-{self.api}-{len(self.axes)}d"


ALONG = {"fsdp": 4}
WAYS = (
    Way(skips_a_sample, "lightseekorg/TorchSpec#126", says="inputs"),
    Way(has_no_more_batches, "pytorch/pytorch#141069", says="has ended"),
    Way(has_no_more_batches, "axolotl-ai-cloud/axolotl#494", "fsdp2", ALONG, says="has ended"),
    Way(leaves_a_step_out, "agentscope-ai/TuFT#121", "functions", says="inputs"),
    Way(stops_early_and_saves, "IBM/ado#41", says="save"),
    Way(calls_units_in_another_order, "pytorch/pytorch#75373", "module", says="gather 'blocks."),
    Way(leaves_a_unit_out, "pytorch/pytorch#148334", "fsdp2", ALONG, says="'blocks."),
    Way(leaves_a_unit_out, "pytorch/torchtitan#2747", "functions"),
    Way(raises_in_forward, "NVIDIA-NeMo/Automodel#2468", says="no valid anchors"),
    Way(raises_in_forward, "NVIDIA-NeMo/Automodel#2468", "fsdp2", ALONG, says="no valid anchors"),
    Way(raises_in_backward, "facebookresearch/fairseq#689", says="out of memory"),
    Way(raises_in_backward, "dmlc/xgboost#11217", "module"),
    Way(raises_and_waits, "huggingface/accelerate#2375", says="no valid anchors"),
    Way(raises_in_backward_and_waits, "NVIDIA/nccl#582", "fsdp2", ALONG, says="out of memory"),
    Way(raises_in_its_loader, "pytorch/pytorch#77030", says="sample 17"),
    Way(raises_in_the_optimizer, "konstmish/prodigy#35", "fsdp2", ALONG, says="optimizer"),
    Way(skips_the_optimizer, "ecmwf/WeatherGenerator#2718", "fsdp2", ALONG, says="step an optimizer"),
    Way(has_another_rate, "ecmwf/WeatherGenerator#2718", "module", says="0.5"),
    Way(saves_alone, "pytorch/pytorch#122903", says="save"),
    Way(gathers_alone, "pytorch/pytorch#143536", "module", says="rank 1 ("),
    Way(evaluates_alone, "pytorch/torchtitan#1092", says="evaluate"),
    Way(evaluates_alone, "pytorch/torchtitan#1092", "fsdp2", ALONG, says="rank 1 ("),
    Way(waits_at_a_barrier, "huggingface/accelerate#3250", says="wait for one another"),
    Way(waits_at_a_barrier, "huggingface/accelerate#3250", "fsdp2", ALONG, says="barrier"),
    Way(adds_up_alone, "meta-pytorch/torchtune#1493", says="wait for one another"),
    Way(adds_up_alone, "meta-pytorch/torchtune#1493", "trainer", ALONG, says="all_reduce"),
    Way(has_another_batch, "axolotl-ai-cloud/axolotl#3920", "functions", says="inputs"),
    Way(draws_a_number, "bigscience-workshop/Megatron-DeepSpeed#276", says="random numbers"),
    Way(holds_gradients_back, "pytorch/pytorch#75901", "module", says="rank 1 ("),
    Way(has_a_nan, "ecmwf/WeatherGenerator#2718", says="not finite on ranks [1]"),
    Way(went_back_a_few_steps, "pytorch/pytorch#113765", "fsdp2", ALONG, says="steps at"),
    Way(is_killed, "NVIDIA/nccl#394", says="has ended without a word"),
    Way(is_killed, "NVIDIA/nccl#394", "fsdp2", ALONG, says="has ended without a word"),
    Way(is_stopped, "ray-project/ray#64928", says="is stopped"),
)


# ---------------------------------------------------------------------------------------------------------------------
# Healthy runs, of which one rank takes its time


def waits_for_its_loader(run: Run, seconds: float) -> None:
    if run.hit:
        time.sleep(seconds)


def computes(run: Run, seconds: float) -> None:
    """What holds the lock of Python for long, as a compiler may."""
    if run.hit:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(100_000))


def retries(run: Run, seconds: float) -> None:
    if run.hit:
        try:
            raise OSError("the disk is away")
        except OSError:
            time.sleep(seconds)


def works_in_the_forward(run: Run, seconds: float) -> None:
    run.model.at_block = (lambda i: time.sleep(seconds / 3)) if run.hit else lambda i: None


def works_in_the_backward(run: Run, seconds: float) -> None:
    def slow(out: Tensor) -> Tensor:
        if out.requires_grad:
            out.register_hook(lambda grad: time.sleep(seconds))
        return out

    run.model.on_output = slow if run.hit else lambda out: out


def evaluates_its_copy(run: Run, seconds: float) -> None:
    if run.hit:
        until = time.monotonic() + seconds
        with torch.random.fork_rng():
            copy = Net()
            while time.monotonic() < until:
                copy(run.batch()[0]).sum().backward()


def writes_a_file(run: Run, seconds: float) -> None:
    if run.hit:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torch.save(run.batch(), run.folder / "log")


def runs_a_process(run: Run, seconds: float) -> None:
    if run.hit:
        import subprocess

        subprocess.run(["sleep", str(seconds)], check=True)


def compiles(run: Run, seconds: float) -> None:
    if run.hit:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torch._dynamo.reset()
            torch.compile(lambda x: (x.sin() + 1).cos(), backend="aot_eager")(run.batch()[0])


def saves_in_the_background(run: Run, seconds: float) -> None:
    """All ranks save; one of them stands after it."""
    if run.step == AT:
        run.trainer.save(run.folder / "run", async_=True)
    waits_for_its_loader(run, seconds)


def waits_for_a_thread(run: Run, seconds: float) -> None:
    if run.hit:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor() as pool:
            pool.submit(time.sleep, seconds).result()


HEALTHY = (
    waits_for_its_loader,
    computes,
    retries,
    works_in_the_forward,
    works_in_the_backward,
    evaluates_its_copy,
    writes_a_file,
    runs_a_process,
    compiles,
    waits_for_a_thread,
)
