"""Two ranks, of which rank 1 stops after one step; test_peer_copy.py runs it.

usage: hung_peer.py RANK STORE_FILE
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import dmuon


def main(rank: int, store: str) -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    torch.cuda.set_device(rank)
    torch.cuda.init()  # a mesh chooses a device by itself for a process that has not
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))
    dist.all_reduce(torch.ones(1, device="cuda"), group=mesh.get_group())  # connecting may take longer than this:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5), mesh.get_group())
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)]).cuda()
    dmuon.dedicate_params(model, mesh, lambda name, p: True, comm="peer")
    x = torch.ones(8, 64, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(60)
        return
    begin = time.monotonic()
    heard = ""
    while "dmuon.comm" not in heard and time.monotonic() - begin < 30:
        try:
            model(x)  # queued; the GPU waits for rank 1
        except Exception as error:  # torch's own, when the GPU stops in the middle of the queueing
            heard = str(error)
        time.sleep(0.5)
    print(f"HEARD {heard}\nAFTER {time.monotonic() - begin:.1f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
