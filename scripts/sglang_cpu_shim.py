"""Lets SGLang's own, unmodified code start without a GPU.

`scripts/sglang_cpu install` puts this module into SGLang's environment together with a `.pth` file
that imports it whenever that environment's Python starts, so the processes that SGLang spawns have
it too. It does two things:

* `sgl_kernel` (CUDA only) is imported in many places, mostly for models and GPUs that are not in
  use. Here it is a package whose names can all be imported but not called: a call raises
  `NotImplementedError`. Nothing is emulated.
* torchvision's CUDA build registers shapes for two operators that its CPU-less library does not
  define; they are declared, without an implementation, before it is imported.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

# SGLang requires a GPU at import time unless told to use the CPU.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Missing:
    """A name in the missing package: it has attributes of the same kind and cannot be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"{self._name} needs a GPU")


class _MissingModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel`, and prepares the import of torchvision."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname == "torchvision" and not self._kept:
            library = importlib.import_module("torch.library").Library("torchvision", "DEF")
            library.define(f"nms{_BOXES}")
            library.define(f"qnms{_BOXES}")
            self._kept.append(library)  # definitions live as long as the library object
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no content."""


sys.meta_path.insert(0, _Finder())
