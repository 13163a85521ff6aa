"""The common part of dump_batch_openrlhf.py, dump_batch_trl.py and dump_batch_verl.py: writes a batch as safetensors for
`rlhf-hpc replay --batch`. DUMP_BATCH names the folder (default: batches), DUMP_BATCH_STEPS the files of each name (1)."""

import importlib.metadata
import os
import torch
from safetensors.torch import save_file

count = {}


def save(system, name, tensors, settings):
    """`tensors` and `settings` without None, the settings as text."""
    count[name] = count.get(name, 0) + 1
    if count[name] > int(os.environ.get("DUMP_BATCH_STEPS", "1")):
        return
    folder, rank = os.environ.get("DUMP_BATCH", "batches"), os.environ.get("RANK", "0")
    os.makedirs(folder, exist_ok=True)
    tensors = {key: torch.as_tensor(x).detach().cpu().clone().contiguous() for key, x in tensors.items() if x is not None}
    tensors = {key: x.float() if x.is_floating_point() else x.long() for key, x in tensors.items()}
    version = f"{system} {importlib.metadata.version(system)}"
    settings = {key: str(x).lower() if isinstance(x, bool) else str(x) for key, x in settings.items() if x is not None}
    path = os.path.join(folder, f"{system}-{name}-{count[name]}-rank{rank}.safetensors")
    save_file(tensors, path, settings | {"rlhf_hpc_batch": "1", "system": version})


def joined(parts):
    """Rows of several parts, padded on the right to one width; None if a part is."""
    if any(x is None for x in parts):
        return None
    width = max(x.shape[-1] for x in parts)
    return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) if x.ndim == 2 else x for x in parts])


def merged(parts):
    """The tensors of several micro-batches, and the micro-batch of each row."""
    tensors = {name: joined([part[name] for part in parts]) for name in parts[0]}
    return tensors | {"microbatch": [i for i, part in enumerate(parts) for _ in part["response_mask"]]}


def replace(space, of, method, function, **more):
    """Calls `function(..., made=METHOD)` instead of a method of the class `of`, if the namespace has the class."""
    if of in space:
        made = getattr(space[of], method)
        setattr(space[of], method, lambda *a, **k: function(*a, made=made, **more, **k))


def watched(module, seen):
    """A hook that keeps the arguments and the result of a module's forward in `seen`."""
    keep = lambda _, given, options, found: seen.update(given=given, options=options, found=found)
    return module.register_forward_hook(keep, with_kwargs=True)
