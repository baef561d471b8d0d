"""A program that leaves its process group while something still refers to it, to be started by torchrun.

No thread may interrupt another one here, so that those of gloo get their turn only when the program waits.
"""

import sys

import torch
import torch.distributed as dist

from hetxl_train.distributed import destroy_process_group

sys.setswitchinterval(100)
dist.init_process_group("gloo")
group, values = dist.group.WORLD, torch.ones(4)
for _ in range(20):
    dist.all_reduce(values, group=group)
destroy_process_group()
