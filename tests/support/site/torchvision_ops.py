"""Let torchvision import beside a CPU build of torch, in the development environment only.

A torchvision wheel built for CUDA cannot load its operators next to a CPU torch and then fails to import at all
(`operator torchvision::nms does not exist`), and timm and parts of transformers with it. Declaring the two operators
it misses is enough for everything that does not call them. Nothing happens until torchvision is imported, and nothing
where its own operators load.
"""

import sys
from importlib.abc import MetaPathFinder


class _TorchvisionOps(MetaPathFinder):
    """Declares the missing operators just before torchvision's own code looks for them."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            self.declare()

    def declare(self):
        import torch

        for name in ("nms", "qnms"):
            if not torch._C._dispatch_has_kernel(f"torchvision::{name}"):
                _libraries.append(torch.library.Library("torchvision", "FRAGMENT"))
                _libraries[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_libraries = []  # a Library takes its operators with it when it is collected

if not any(type(finder).__name__ == "_TorchvisionOps" for finder in sys.meta_path):
    sys.meta_path.insert(0, _TorchvisionOps())
