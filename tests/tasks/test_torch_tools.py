"""Models are ordinary torch modules: other people's tools work on them."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from ready_models import MODELS, make_batch, make_model
from torch import nn

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("name", MODELS)
def test_hooks_see_every_module(name):
    """A forward hook of somebody else runs for every module with weights of its own that is a part of the loss."""
    model, batch, seen = make_model(name), make_batch(name), set()
    handles = [one.register_forward_hook(lambda module, *_: seen.add(module)) for one in model.modules()]
    loss = model(batch)
    for handle in handles:
        handle.remove()
    (loss.total / loss.tokens).backward()
    assert model in seen
    norms = [one for one in model.modules() if isinstance(one, nn.LayerNorm | nn.RMSNorm)]
    assert all(one in seen for one in norms)
    assert all(type(one).__call__ is nn.Module.__call__ for one in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_equal_one(way):
    """One step of DistributedDataParallel, and of fully_shard over the blocks, with two processes over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, TESTS / "distributed_step.py", way],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert [row[0] for row in rows] == list(MODELS)
    for name, loss, gradient, missing in rows:
        assert (float(loss) < 1e-5, float(gradient) < 1e-5, int(missing)) == (True, True, 0), (way, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_gives_the_same_loss(name):
    model, batch = make_model(name), make_batch(name)
    wanted = model(batch, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler itself
        torch.compiler.reset()
        found = torch.compile(model, backend="aot_eager")(batch, 0.1)  # inductor takes half a minute a model
        (found.total / found.tokens).backward()
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-4, atol=1e-5)
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
