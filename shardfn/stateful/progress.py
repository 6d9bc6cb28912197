"""What a run shows of itself: how fast its steps are, and a bar, or a line now and then."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter
from typing import Any

_PAUSE = 10.0  # seconds between two lines in a log


class Clock:
    """Measures steps from the end of the one before, so that the time in which data are loaded counts."""

    def __init__(self) -> None:
        self._last: float | None = None

    def begin(self) -> None:
        """A step begins; of the first one, and of one after something else, that is when its time does."""
        self._last = perf_counter() if self._last is None else self._last

    def seconds(self) -> float:
        """A step has ended: how long it took."""
        assert self._last is not None
        before, self._last = self._last, perf_counter()
        return max(self._last - before, 1e-9)

    def pause(self) -> None:
        """Something else than steps is done now, which is not part of the next one."""
        self._last = None


class Progress:
    """A callback for `Trainer`: a progress bar on the first rank, with loss, tokens per second and learning rate.

    The bar is tqdm's (`pip install shardfn[progress]`). Without tqdm, and where the output is no terminal (a log file),
    there is a line every ten seconds, and one at the end.

        >>> import torch, shardfn as sf
        >>> from torch import nn
        >>> model = nn.Linear(4, 1)
        >>> def loss_fn(params, x):
        ...     return sf.apply(model, params, x).square().mean()
        >>> bar = sf.Progress(steps=3, more=lambda trainer, out: f"norm {out['grad_norm'] > 0}")
        >>> mesh = sf.make_mesh("cpu", fsdp=1)
        >>> trainer = sf.Trainer(model, mesh, optimizer=sf.optim.sgd(0.0), loss_fn=loss_fn, callbacks=[bar])
        >>> for _ in range(3):
        ...     out = trainer.step(torch.zeros(2, 4))  # doctest: +ELLIPSIS
        step 3/3  loss ...  lr 0  norm True

    Args:
        steps: at which step of the trainer the run is over.
        more: what to show besides, given the trainer and what its step returned; called on the first rank only, when it
            is shown, so it must not communicate.

    Communication: none.
    """

    def __init__(self, steps: int, *, more: Callable[[Any, dict[str, Any]], str] | None = None) -> None:
        self._steps, self._more = steps, more
        self._bar: Any = None
        self._printed = perf_counter()
        self._tokens = self._seconds = 0.0

    def __call__(self, trainer: Any, out: dict[str, Any]) -> None:
        """One more step is done."""
        if trainer.mesh.get_rank() != 0 or trainer.steps > self._steps:
            return
        if self._bar is None and sys.stderr.isatty() and find_spec("tqdm"):
            from tqdm import tqdm

            line = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"  # some terminals say that they have no rows
            self._bar = tqdm(total=self._steps, initial=trainer.steps - 1, bar_format=line, nrows=2)
        self._tokens += out["tokens"]
        self._seconds += out["seconds"]
        done, now = trainer.steps == self._steps, perf_counter()
        if self._bar is not None:
            self._bar.set_postfix_str(self._line(trainer, out), refresh=False)
            self._bar.update()
        elif done or now - self._printed > _PAUSE:
            self._printed = now
            print(f"step {trainer.steps}/{self._steps}  {self._line(trainer, out)}", flush=True)
        if done:
            self.close()

    def _line(self, trainer: Any, out: dict[str, Any]) -> str:
        parts = [f"loss {float(out['loss']):.4g}", f"{self._tokens / self._seconds:,.0f} tokens/s"]
        parts += [] if out["lr"] is None else [f"lr {out['lr']:.3g}"]
        return "  ".join([*parts, *([self._more(trainer, out)] if self._more is not None else [])])

    def close(self) -> None:
        """Leave the bar as it is, so that what is printed next begins on a line of its own."""
        if self._bar is not None:
            self._bar.close()
