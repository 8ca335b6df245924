"""``python -m torchbearer_ddp inspect``: what is in a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from torchbearer_ddp.checkpoints import contents
from torchbearer_ddp.commands import words
from torchbearer_ddp.commands.opened import Opened, as_json, open_checkpoint
from torchbearer_ddp.commands.parser import FOUND, GOOD, command_parser
from torchbearer_ddp.group import layouts

_DESCRIPTION = """\
Shows what is in a checkpoint: epoch, step, metrics, world size, versions, the size of each part and
whether its checksums are right. Of a folder it shows the newest checkpoint that is whole. Files of
other origin (a Trial's or a model's state dict) are shown as far as they are plain data. Nothing in
the file is run, and nothing is changed.
"""
#: Shown elsewhere.
_NO_PARTS = (contents.SECTION, "torchbearer_version", "versions")
_EXAMPLE = "runs/a\nruns/a/best-val_loss.pt --tensors"


def main(arguments: list[str]) -> None:
    """Prints what is in a checkpoint."""
    codes = {GOOD: "the checkpoint is whole", FOUND: "it is damaged, missing or not plain data"}
    parser = command_parser("inspect", _DESCRIPTION, _EXAMPLE, codes)
    parser.add_argument("checkpoint", type=Path, help="a file, or the folder of a run")
    parser.add_argument("--tensors", action="store_true", help="list every tensor of the model")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    options = parser.parse_args(arguments)
    found = describe(open_checkpoint(options.checkpoint), tensors=options.tensors)
    print(as_json(found) if options.json else text(found))


def describe(opened: Opened, *, tensors: bool = False) -> dict[str, Any]:
    """What is in a checkpoint, as plain data."""
    section, payload = opened.section, opened.payload
    history = payload.get(contents.HISTORY) or [{}]
    status = opened.path.stat()
    found: dict[str, Any] = {
        "file": str(opened.path),
        "size": status.st_size,
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.st_mtime)),
        "checksum": f"{opened.label.records:08x}" if opened.label else None,
        "serial": opened.label.serial if opened.label else None,
        "damaged": opened.damaged,
        "format": section.get("format"),
        "epochs": section.get("epochs", len(payload.get(contents.HISTORY) or [])),
        "batch": section.get("batch", 0),
        "step": section.get("global_step"),
        "world size": section.get("world_size"),
        "batch size": section.get("batch_size"),
        "steps of an epoch": section.get("train_steps"),
        "stopped": section.get("stopped"),
        "metrics": dict(history[-1]),
        "versions": _versions(payload, section),
        "callbacks": list(section.get("callbacks", {})),
        "parts": parts(opened),
        "model": model(payload.get(contents.MODEL)),
    }
    if tensors:
        found["tensors"] = {
            name: [list(each.shape), _dtype(each)]
            for name, each in (payload.get(contents.MODEL) or {}).items()
            if isinstance(each, torch.Tensor)
        }
    return found


def _versions(payload: dict[str, Any], section: dict[str, Any]) -> dict[str, str]:
    known = {"torchbearer": payload.get("torchbearer_version"), **section.get("versions", {})}
    return {name: str(version) for name, version in known.items() if version is not None}


def parts(opened: Opened) -> dict[str, int]:
    """The bytes of each part, by name; each rank's own part by its number."""
    payload, section = opened.payload, opened.section
    found = {n: count_bytes(part) for n, part in payload.items() if n not in _NO_PARTS}
    for name, part in section.items():
        if name == "ranks" and isinstance(part, list):
            found |= {f"rank {number}": count_bytes(each) for number, each in enumerate(part)}
        elif isinstance(part, dict) and name not in _NO_PARTS:
            found[name] = count_bytes(part)
    return {name: count for name, count in found.items() if count}


def count_bytes(value: Any) -> int:
    """The bytes of the tensors and texts in a value, at any depth."""
    if isinstance(value, torch.Tensor):
        pieces = layouts.sparse_parts(value)
        return value.numel() * value.element_size() if pieces is None else count_bytes(pieces)
    if isinstance(value, dict):
        return count_bytes([*value.keys()]) + count_bytes([*value.values()])
    if isinstance(value, list | tuple | set):
        return sum(map(count_bytes, value))
    return len(value) if isinstance(value, str | bytes) else 8 * isinstance(value, int | float)


def model(state: Any) -> dict[str, Any]:
    """How many tensors and elements a model's state dict has, of which types."""
    tensors = [each for each in (state or {}).values() if isinstance(each, torch.Tensor)]
    return {
        "tensors": len(tensors),
        "elements": sum(each.numel() for each in tensors),
        "types": sorted({_dtype(each) for each in tensors}),
    }


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def text(found: dict[str, Any]) -> str:
    """The description in lines."""
    where = f"after epoch {found['epochs']}"
    if found["batch"]:
        where = f"in epoch {found['epochs'] + 1}, after batch {found['batch']}"
    shape = found["model"]
    checksum = f"right (CRC-32 of every record, {found['checksum']} of their list)"
    rows = {
        "size": f"{words.size(found['size'])}, written {found['written']}",
        "checksum": checksum if found["checksum"] else "none: not written by Checkpoint",
        "saved": where + ("" if found["step"] is None else f", step {found['step']}"),
        "stopped by": found["stopped"],
        "world size": found["world size"],
        "batch size": found["batch size"] and f"{found['batch size']} on each rank",
        "model": f"{shape['tensors']} tensors, {shape['elements']:,} elements "
        f"({', '.join(shape['types'])})",
        "callbacks": ", ".join(found["callbacks"]) or None,
    }
    lines = words.section(found["file"], {n: r for n, r in rows.items() if r is not None})[1:]
    metrics = {n: f"{v:.6g}" if isinstance(v, float) else v for n, v in found["metrics"].items()}
    lines += words.section("metrics of the last epoch", metrics)
    lines += words.section("written with", found["versions"])
    lines += words.section("parts", {n: words.size(c) for n, c in found["parts"].items()})
    shapes = found.get("tensors", {})
    lines += words.section("tensors", {n: f"{tuple(s)} {kind}" for n, (s, kind) in shapes.items()})
    if found["damaged"]:
        lines += ["", "newer files in this folder cannot be used:"]
        lines += [f"  {problem}" for problem in found["damaged"]]
    return "\n".join(lines)
