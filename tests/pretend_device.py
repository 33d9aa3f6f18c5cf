"""A device that computes on the CPU and, as a GPU does, refuses tensors that lie elsewhere: device mistakes show without a GPU.

`python tests/pretend_device.py COMMANDS.json` runs a list of `deepspec` command lines in one process that has the device `pretend`."""
import json
import sys
from pathlib import Path

import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

DEVICE = torch.device('privateuseone', 0)
MAY_CROSS = {'_to_copy', 'copy_'} # what a copy between devices is made of


class Pretend(torch.Tensor):
    "A tensor on the pretended device; `raw` is the CPU's tensor behind it"
    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
                                                   dtype=raw.dtype, device=DEVICE)

    def __init__(self, raw): self.raw = raw
    def __repr__(self): return f'Pretend({self.raw!r})'
    def tolist(self): return self.raw.tolist()
    def new_tensor(self, data): return torch.tensor(data, dtype=self.dtype, device=DEVICE)
    def __getitem__(self, key): return super().__getitem__(_placed(key))
    def __setitem__(self, key, value): super().__setitem__(_placed(key), value)

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None): return compute(op, *args, **(kwargs or {}))


def _placed(key):
    "Lists of an index as tensors, since torch would build them in C++, where a Python device cannot follow"
    if isinstance(key, tuple): return tuple(map(_placed, key))
    return torch.tensor(list(key), device=DEVICE) if isinstance(key, list | range) else key


def compute(op, *args, **kwargs):
    "One operation on the CPU's tensors; `RuntimeError` where a tensor with dimensions lies on another device"
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    pretended = [t for t in tensors if isinstance(t, Pretend)]
    name = op._schema.name.removeprefix('aten::')
    if pretended and name not in MAY_CROSS and any(t.ndim for t in tensors if not isinstance(t, Pretend)):
        raise RuntimeError(f'{op}: expected all tensors on the same device, found {DEVICE} and cpu')
    device = None if kwargs.get('device') is None else torch.device(kwargs['device'])
    raw_args, raw_kwargs = tree_map(lambda t: t.raw if isinstance(t, Pretend) else t, (args, kwargs))
    out = op(*raw_args, **(raw_kwargs if device is None else raw_kwargs | dict(device='cpu')))
    if device is not None and device.type == 'cpu': return out.clone() # nothing of it may share memory with the device
    if name == 'copy_' and not isinstance(args[0], Pretend): return args[0]
    same = {id(t.raw): t for t in pretended} # what an operation in place returns is the tensor it was given
    result = tree_map(lambda t: same.get(id(t)) if id(t) in same else Pretend(t) if isinstance(t, torch.Tensor) else t, out)
    return return_and_correct_aliasing(op, args, kwargs, result) if len(pretended) == len(tensors) > 0 else result


class Backend(_DummyBackendModule):
    "What torch asks of `torch.pretend`"
    def get_amp_supported_dtype(self): return [torch.bfloat16]


def install():
    "Make `pretend` a device of this process"
    _setup_privateuseone_for_python_backend('pretend', Backend())
    library = torch.library.Library('_', 'IMPL')
    library.fallback(compute, 'PrivateUse1')
    _device_constructors() # remembers the true `torch.tensor`, which `with torch.device(...)` looks for
    tensor, generator = torch.tensor, torch.Generator
    def made_on_the_cpu(data, *, device=None, **kwargs):
        if device is None or torch.device(device).type != 'pretend': return tensor(data, device=device, **kwargs)
        return tensor(data, device='cpu', **kwargs).to(device) # as for the lists of an index
    torch.tensor = made_on_the_cpu
    class Generator(generator):
        "On a pretended device the CPU's numbers are drawn"
        def __new__(cls, device='cpu'): return generator.__new__(generator, 'cpu')
    torch.Generator = Generator
    torch.inference_mode = torch.no_grad # tensors of Python classes cannot lack a version
    return library # the fallback lives as long as this


if __name__ == '__main__':
    kept = install()
    from deepspec.cli.main import main
    for words in json.loads(Path(sys.argv[1]).read_text()):
        print('$ deepspec', *words, flush=True)
        try: main(list(map(str, words)))
        except SystemExit as e:
            if e.code: raise
