"""`examples/ray_train.py`, with a real Ray: trains, loses workers, goes on with those that are left."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

vit = importlib.import_module("vit")


@pytest.fixture
def double() -> Iterator[None]:
    """Models and images of float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _losses(steps: int, batch: int) -> list[float]:
    """Of one process, by torch alone."""
    losses = list[float]()
    model = vit.make_model()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        images, labels = vit.make_images(batch, seed=step)
        loss = nn.functional.cross_entropy(model(pixel_values=images).logits, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.eco
@pytest.mark.usefixtures("double")
def test_a_node_is_lost(tmp_path: Path) -> None:
    """Four workers on 2 x 2, then two on 1 x 2: the losses of one process that nothing happened to."""
    path = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    # How soon Ray finds out that a node is dead, and how long it waits for workers on one of which it does not know it.
    quick = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
    quick |= {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("lose_a_node.py")), str(tmp_path)]
    done = subprocess.run(command, env=os.environ | quick, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-10000:]
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ROWS ", "PAUSE ")))
    rows = json.loads(told["ROWS"])
    assert [row["step"] for row in rows] == [*range(5, 61, 5)]
    assert [*dict.fromkeys(row["workers"] for row in rows)] == [4, 2]
    expected = _losses(60, 48)
    assert max(abs(row["loss"] - expected[row["step"] - 1]) / row["loss"] for row in rows) <= 1e-10, rows
    print("seconds from the death to the next checkpoint:", told["PAUSE"])
