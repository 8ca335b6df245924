"""Tensors of every layout and dtype: their parts, their bytes, and writing into them.

Strides are kept wherever a tensor is copied or sent, because fused optimizers read the memory of a
parameter and of its state in the same order.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.group import local_work

_COMPRESSED_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_NUMBERS = (torch.Tensor, int, float)
#: The largest whole number that a tensor takes.
_LARGEST = 2**63 - 1
#: What a step needs of each parameter's state where a setting is on.
_NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
_TORCHS = {
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
}
#: Those whose state is not only numbers, and tensors of the shapes of the parameters.
_INTRICATE = (torch.optim.Adafactor, torch.optim.LBFGS)
#: What the others keep as one number for each parameter.
_COUNTED = ("step", "eta", "mu", "mu_product")
_OPTIMIZER = checked.record(
    {
        "state": checked.table(checked.table(checked.anything), checked.anything),
        "param_groups": checked.items(checked.record({"params": checked.items(checked.anything)})),
    }
)
#: Options of an optimizer that say how a step is computed, and not what.
_COMPUTATION = ("foreach", "fused", "capturable", "differentiable")


def is_strided(tensor: torch.Tensor) -> bool:
    """True for a tensor whose elements are in memory at its strides, and mean themselves."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not tensor.is_nested


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The strided tensors of which a sparse tensor is made; None if it is not sparse."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED_BY_ROW:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _COMPRESSED_BY_COLUMN:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def from_sparse_parts(
    layout: torch.layout, parts: Sequence[torch.Tensor], shape: Any, *, coalesced: bool
) -> torch.Tensor:
    """The sparse tensor that :func:`sparse_parts` took apart; impossible indices are refused."""
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=coalesced, check_invariants=True
        )
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=True
    )


def is_coalesced(tensor: torch.Tensor) -> bool:
    """Whether a sparse tensor has each index once, as far as torch has noted."""
    return tensor.layout is torch.sparse_coo and tensor.is_coalesced()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements side by side in memory, and its dimensions in the same order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # torch keeps the strides of what has neither gaps nor repeated elements.
    is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor if is_dense else tensor.clone()


def described(tensor: torch.Tensor) -> str:
    """The shape of a tensor, and the order of its dimensions in memory if it is unusual."""
    is_usual = not is_strided(tensor) or tensor.is_contiguous()
    return f"{tuple(tensor.shape)}{f' with strides {tensor.stride()}' * (not is_usual)}"


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a :func:`dense` tensor in the order of its memory, without a copy."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a strided tensor in the order of its indices, whatever its strides."""
    return memory(tensor.detach().resolve_conj().resolve_neg().contiguous())


def overwrite_bytes(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Gives a strided tensor the elements whose bytes :func:`to_bytes` has put into this order.

    Where those are the memory of the tensor itself, there is nothing left to do.
    """
    if flat.data_ptr() == tensor.data_ptr():
        torch.autograd.graph.increment_version(tensor)  # as any operation in place does
    else:
        overwrite(tensor, flat.view(tensor.dtype).view(tensor.shape))


def make_writable(tensor: torch.Tensor) -> None:
    """Gives an expanded tensor memory of its own: torch refuses to write into it."""
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor.data = tensor.detach().contiguous()


@torch.no_grad()
def overwrite(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor the value of another one with the same layout."""
    if tensor.layout in (*_COMPRESSED_BY_ROW, *_COMPRESSED_BY_COLUMN):
        # copy_ wants equally many elements, and not every storage can be resized.
        swapped = value.to(tensor.device, copy=True)
        torch.utils.swap_tensors(tensor, swapped)  # type: ignore[no-untyped-call]
        return
    if is_strided(tensor):
        make_writable(tensor)
    tensor.copy_(value)


@torch.no_grad()
def load_optimizer(optimizer: Any, saved: dict[str, Any]) -> None:
    """Loads an optimizer's state dict; each part of it gets the strides of its parameter.

    How steps are computed stays as it is here: the file may be of another device.
    """
    groups = [dict(group) for group in getattr(optimizer, "param_groups", ())]
    states = dict(getattr(optimizer, "state", {}))
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(saved, groups)
        if (kind := type(optimizer)) in _TORCHS:
            if kind not in _INTRICATE:
                _check_state(kind, saved, groups)
            _check_values(kind, saved, groups)
    optimizer.load_state_dict(_computed_as_here(saved, groups))
    for before, group in zip(groups, getattr(optimizer, "param_groups", ()), strict=True):
        group.update({key: _kept(before.get(key), group[key]) for key in group if key != "params"})
        if group.get("capturable"):
            for parameter in group["params"]:
                _load_into(states.get(parameter, {}), optimizer.state.get(parameter, {}))
    for parameter, held in getattr(optimizer, "state", {}).items():
        for key, value in held.items() if isinstance(held, dict) else ():
            if _differs_in_strides(value, parameter):
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                held[key] = laid_out.detach().copy_(value)


def check_optimizer(saved: dict[str, Any], groups: Sequence[dict[str, Any]]) -> None:
    """Refuses what torch would load into these groups, and only fail on at the next step."""
    _OPTIMIZER(saved, "its state dict")
    checked.items(checked.anything, len(groups))(saved["param_groups"], "the list of its groups")
    names = [name for group in saved["param_groups"] for name in group["params"]]
    if len({*names}) < len(names):
        raise checked.Unexpected("its groups name a parameter twice")
    for index, (here, there) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        passed_over = ("params", *_COMPUTATION)  # which are those here
        for key in [each for each in here if each in there and each not in passed_over]:
            _check_setting(here[key], there[key], f"{key!r} of its group {index}")


def _check_state(
    kind: type[torch.optim.Optimizer], saved: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Refuses a state that is neither a number nor a tensor like its parameter."""
    for group in saved["param_groups"]:
        for setting in [each for each in _NEEDED if group.get(each)]:
            for held in [saved["state"].get(name) for name in group["params"]]:
                if held:
                    checked.record({_NEEDED[setting]: checked.anything})(held, "its state")
    steps = [held["step"] for held in saved["state"].values() if "step" in held]
    if len({isinstance(each, torch.Tensor) for each in steps}) > 1:  # torch looks at the first
        raise checked.Unexpected("some of its steps are tensors, and some are numbers")
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        held = saved["state"].get(name, {})
        if kind is torch.optim.Adagrad:  # makes its state before the first step, and not later
            checked.record({"sum": checked.anything})(held, f"the state of its parameter {name}")
        for key, value in held.items():
            where = f"{key!r} of its parameter {name}"
            if key in _COUNTED:
                if _one_number(value, where) < 0 and key == "step":
                    raise checked.Unexpected(f"{where} is {checked.shown(value)}, less than 0")
            elif value is not None or kind is not torch.optim.SGD:  # which has it without momentum
                checked.kind(torch.Tensor, "a tensor")(value, where)
                checked.one_of(parameter.shape)(value.shape, f"the shape of {where}")


def _check_values(
    kind: type[torch.optim.Optimizer], saved: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> None:
    """Refuses what the class itself refuses, where it takes what is here: settings, and states.

    For states of which only the class knows the form, it takes a step with copies.
    """
    names = inspect.signature(kind).parameters
    for index, (here, there) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        passed_over = ("params", *_COMPUTATION)
        settings = {key: here[key] for key in here if key in names and key not in passed_over}
        theirs = {key: there[key] for key in settings if key in there}
        loaded = {**settings, **{k: _kept(_copied(here[k]), v) for k, v in theirs.items()}}
        if (refusal := _refusal(kind, loaded)) and not _refusal(kind, settings):
            raise checked.Unexpected(f"a setting of its group {index} is refused: {refusal}")
        if kind in _INTRICATE:
            held = [saved["state"].get(name, {}) for name in there["params"]]
            pairs = list(zip(here["params"], held, strict=True))
            # One after the other takes less memory; LBFGS has the state of all at its first.
            for part in [pairs] if kind is torch.optim.LBFGS else [[pair] for pair in pairs]:
                refusal = _refusal(kind, loaded, part)
                if refusal and not _refusal(kind, settings, [(each, {}) for each, _ in part]):
                    raise checked.Unexpected(f"a state of its group {index} is refused: {refusal}")


def _refusal(
    kind: type[torch.optim.Optimizer],
    settings: dict[str, Any],
    tried: Sequence[tuple[torch.Tensor, dict[str, Any]]] = (),
) -> str | None:
    """Why a class does not take a step with settings, of parameters like these with their states.

    LBFGS keeps or drops a part of its state by the sign of the gradient, so both are tried.
    """
    try:
        for gradient in (1000.0, -1000.0):
            like = [parameter for parameter, _ in tried] or [torch.empty(1, 1, device="cpu")]
            copies = [
                torch.ones(p.shape, dtype=p.dtype, requires_grad=True, device="cpu") for p in like
            ]
            made = kind(copies, **settings)
            states = {n: copy.deepcopy(state) for n, (_, state) in enumerate(tried) if state}
            made.load_state_dict({**made.state_dict(), "state": states})
            for each in copies:
                each.grad = torch.full_like(each, gradient)
            with local_work.local():  # nothing is to be averaged
                made.step(lambda: 0.0)
    except Exception as error:  # torch raises AssertionError as well
        return checked.first_line(error)
    return None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _check_setting(live: Any, loaded: Any, where: str) -> None:
    """Refuses a setting that is one number here and something else there."""
    if isinstance(live, bool):
        checked.boolean(loaded, where)
    elif isinstance(live, int | float | torch.Tensor):
        _one_number(loaded, where)
    elif isinstance(live, tuple | list):
        checked.items(checked.anything, len(live))(loaded, where)
        for pair in zip(live, loaded, strict=True):
            _check_setting(*pair, where)


def _one_number(value: Any, where: str) -> Any:
    """A number, also as a tensor; True is none, and fails in arithmetic."""
    checked.kind(_NUMBERS, "a number or a tensor")(value, where)
    is_several = isinstance(value, torch.Tensor) and value.numel() != 1
    if isinstance(value, bool) or is_several or (type(value) is int and abs(value) > _LARGEST):
        raise checked.Unexpected(f"{where} is {checked.shown(value)}, not one number")
    return value


def _load_into(before: dict[str, Any], held: dict[str, Any]) -> None:
    """Keeps the memory of a state, which a captured graph reads and writes."""
    for key, value in held.items():
        if _is_same_kind(before.get(key), value):
            held[key] = before[key].copy_(value)


def _computed_as_here(saved: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    theirs = saved.get("param_groups", ())
    if len(theirs) != len(groups):
        return saved  # which torch refuses
    kept = [
        {**there, **{key: here[key] for key in _COMPUTATION if key in here and key in there}}
        for there, here in zip(theirs, groups, strict=True)
    ]
    return {**saved, "param_groups": kept}


def _kept(live: Any, loaded: Any) -> Any:
    """A loaded setting in the form that it has here: a number, or the memory of a tensor."""
    if isinstance(live, torch.Tensor) and isinstance(loaded, torch.Tensor | int | float):
        return live.copy_(torch.as_tensor(loaded))
    if isinstance(live, int | float) and isinstance(loaded, torch.Tensor):
        return loaded.item()
    if isinstance(live, tuple) and isinstance(loaded, tuple | list) and len(live) == len(loaded):
        return tuple(_kept(*pair) for pair in zip(live, loaded, strict=True))
    return loaded


def _is_same_kind(one: Any, other: Any) -> bool:
    both = [one, other]
    if not all(isinstance(each, torch.Tensor) and is_strided(each) for each in both):
        return False
    kinds = [(each.shape, each.dtype, each.device) for each in both]
    return kinds[0] == kinds[1]


def _differs_in_strides(value: Any, parameter: Any) -> bool:
    both = [value, parameter]
    if not all(isinstance(each, torch.Tensor) and is_strided(each) for each in both):
        return False
    return bool(value.shape == parameter.shape and value.stride() != parameter.stride())
