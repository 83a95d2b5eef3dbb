"""One training step of every model by two processes: DistributedDataParallel, or blocks that are fully sharded. Prints
how far loss and gradients are from those of one process; run by torchrun (tests/tasks/test_torch_tools.py)."""

import os
import sys

import torch
import torch.distributed as dist
from ready_models import MODELS, make_batch, make_model
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from regard.nn.transformer import Block


def gradients(model):
    """Every gradient by name, whole."""
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}


def step(model, batch, tokens):
    """The loss of a batch over the tokens of all, and its gradients."""
    loss = model(batch, 0.1)
    (loss.total / tokens).backward()
    return float(loss.total.detach())


def main(way):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in MODELS:
        whole = make_batch(name)
        alone = make_model(name)
        wanted = step(alone, whole, whole.tokens)
        model = make_model(name)
        own = whole.select(slice(rank, None, 2))
        tool = model
        if way == "ddp":
            tool = DistributedDataParallel(model)
        else:
            for block in (one for one in model.modules() if isinstance(one, Block)):
                fully_shard(block)
                if block.cross_attention is not None:  # where keys and values are projected before the blocks
                    register_fsdp_forward_method(block, "project_source")
            fully_shard(model)
        loss = torch.tensor(step(tool, own, whole.tokens / dist.get_world_size()))  # both average over the processes
        dist.all_reduce(loss)
        found, right = gradients(model), gradients(alone)
        far = max(float((found[one] - right[one]).abs().max()) for one in right)
        if rank == 0:
            missing = right.keys() - found.keys()
            print(f"{name}\t{abs(float(loss) - wanted) / abs(wanted):.1e}\t{far:.1e}\t{len(missing)}", flush=True)
    dist.barrier()  # who is done first must not close what the other still reads from
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # threads of gloo kept a process from ending, now and then
