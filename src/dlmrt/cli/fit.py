"""What fits: bytes of a model in each format against the memory of this machine and of GPUs, and how fast it could be.

The rates are ceilings: bandwidth over the bytes that a forward reads (dlmrt.checkpoint.footprint), times the tokens
that a forward decides. Auto-regressive stands for one row and one token a forward on the same weights.

Source: memory and bandwidth of NVIDIA's data sheets: GeForce RTX 3090, 4090 and 5090, RTX PRO 6000 Blackwell, L40S,
A100 80GB SXM, H100 SXM, H200; a B200 is an eighth of DGX B200 (1,440 GB, 64 TB/s).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from dlmrt.cli.report import readable_bytes
from dlmrt.errors import UnknownOptionError, UsageError, nearest

if TYPE_CHECKING:
    from dlmrt.checkpoint.footprint import Sizes
    from dlmrt.checkpoint.load import Checkpoint

_GPUS: dict[str, tuple[int, int]] = {  # name -> (GB, GB/s), both decimal
    "rtx3090": (24, 936),
    "rtx4090": (24, 1008),
    "rtx5090": (32, 1792),
    "rtxpro6000": (96, 1792),
    "l40s": (48, 864),
    "a100": (80, 2039),
    "h100": (80, 3350),
    "h200": (141, 4800),
    "b200": (180, 8000),
}
THIS_MACHINE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a model could run."""

    name: str
    memory_bytes: int | None  # None: unknown
    bytes_per_second: int | None  # likewise


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of it."""

    context_length: int
    tokens_per_forward: float
    experts: float | None = None  # of a layer, touched by a forward; None: those of uniform choices


def gpus(names: Sequence[str]) -> list[Device]:
    """Devices of the table.

    Raises:
        UnknownOptionError: a name that it does not have.
    """
    devices = []
    for name in names:
        key = name.lower().replace("-", "").replace(" ", "")
        if key not in _GPUS:
            raise UnknownOptionError(f"unknown GPU {name!r}{nearest(key, _GPUS)}")
        memory, rate = _GPUS[key]
        devices.append(Device(name=key, memory_bytes=memory * 10**9, bytes_per_second=rate * 10**9))
    return devices


def this_machine(bandwidth: float | None) -> Device:
    """The memory that is free here; its bandwidth, in GB/s, only if it is given."""
    from dlmrt.cpu.memory import available_bytes

    rate = None if bandwidth is None else int(bandwidth * 10**9)
    return Device(name=THIS_MACHINE, memory_bytes=available_bytes(), bytes_per_second=rate)


def fit_report(checkpoint: Checkpoint, workload: Workload, devices: Sequence[Device]) -> dict[str, Any]:
    """What `dlmrt show` prints under "fit", as JSON values.

    Raises:
        UsageError: the context is longer than the model's, or there are fewer experts than asked for.
    """
    from dlmrt.checkpoint import footprint

    config = checkpoint.config
    if workload.context_length > config.max_position_embeddings:
        raise UsageError(
            f"--context {workload.context_length} is more than the {config.max_position_embeddings} positions of the "
            "model; ask for fewer"
        )
    if workload.experts is not None and (config.moe is None or workload.experts > config.moe.num_experts):
        count = 0 if config.moe is None else config.moe.num_experts
        raise UsageError(f"--experts {workload.experts:g}, and a layer of this model has {count}; ask for fewer")
    rows = config.diffusion.canvas_length if config.diffusion else 1
    kv, buffers = footprint.kv_bytes(config, workload.context_length), footprint.buffer_bytes(config)
    kv_read = footprint.kv_bytes(config, workload.context_length, is_read=True)
    formats = {}
    for name, sizes in _formats(checkpoint):
        weights = sum(sizes.values())
        formats[name] = {
            "weights_bytes": weights,
            "total_bytes": weights + kv + buffers,
            "read_bytes_per_forward": round(
                footprint.read_bytes(config, sizes, rows=rows, experts=workload.experts) + kv_read
            ),
            "read_bytes_per_token_autoregressive": round(footprint.read_bytes(config, sizes, rows=1) + kv_read),
        }
    experts = None if config.moe is None else workload.experts or footprint.touched_experts(config, rows)
    per_token = footprint.kv_bytes(config, 1)
    return {
        "context_length": workload.context_length,
        "rows_per_forward": rows,
        "tokens_per_forward": workload.tokens_per_forward,
        "experts_per_forward": experts,
        "kv_bytes": kv,
        "buffer_bytes": buffers,
        "formats": formats,
        "devices": {
            device.name: _on_device(
                device, formats, workload.tokens_per_forward, buffers, per_token, config.max_position_embeddings
            )
            for device in devices
        },
    }


def _formats(checkpoint: Checkpoint) -> Iterator[tuple[str, Sizes]]:
    """As stored, then what `dlmrt quantize` could make of it."""
    from dlmrt.checkpoint.footprint import float_sizes, quantized_sizes, stored_sizes
    from dlmrt.checkpoint.policy import Policy
    from dlmrt.checkpoint.scheme import QuantFormat

    yield "stored", stored_sizes(checkpoint.weights())
    yield "bfloat16", float_sizes(checkpoint.config, "bfloat16")
    for format in get_args(QuantFormat):
        for policy in get_args(Policy):
            sizes = quantized_sizes(checkpoint.config, format, policy)
            if sizes is not None:
                yield f"{format} {policy}", sizes


def _on_device(
    device: Device, formats: Mapping[str, Mapping[str, int]], tokens_per_forward: float, buffers: int, per_token: int,
    longest: int,
) -> dict[str, Any]:  # fmt: skip
    rows = {}
    for name, sizes in formats.items():
        row: dict[str, Any] = {"fits": None, "max_context_length": None}
        if device.memory_bytes is not None:
            left = device.memory_bytes - sizes["weights_bytes"] - buffers
            row = {
                "fits": sizes["total_bytes"] <= device.memory_bytes,
                "max_context_length": max(0, min(longest, left // per_token)),
            }
        rate = device.bytes_per_second
        forwards = None if rate is None else rate / sizes["read_bytes_per_forward"]
        row |= {
            "max_forwards_per_second": forwards,
            "max_tokens_per_second": None if forwards is None else forwards * tokens_per_forward,
            "max_tokens_per_second_autoregressive": None
            if rate is None
            else rate / sizes["read_bytes_per_token_autoregressive"],
        }
        rows[name] = row
    return {"memory_bytes": device.memory_bytes, "bytes_per_second": device.bytes_per_second, "formats": rows}


def fit_lines(report: Mapping[str, Any]) -> list[str]:
    """The report for people."""
    experts = report["experts_per_forward"]
    lines = [
        f"fit at a context of {report['context_length']:,} tokens: keys and values "
        f"{readable_bytes(report['kv_bytes'])}, buffers {readable_bytes(report['buffer_bytes'])}",
        f"{'':2}{'format':<18}{'weights':>12}{'in all':>12}{'read a forward':>18}",
    ]
    for name, sizes in report["formats"].items():
        columns = (sizes["weights_bytes"], sizes["total_bytes"], sizes["read_bytes_per_forward"])
        weights, total, read = map(readable_bytes, columns)
        lines.append(f"  {name:<18}{weights:>12}{total:>12}{read:>18}")
    if experts is not None:
        lines.append(
            f"  a forward of {report['rows_per_forward']} rows is taken to touch {experts:.1f} experts a layer"
        )
    for name, device in report["devices"].items():
        lines += _device_lines(name, device, report["tokens_per_forward"])
    return lines


def _device_lines(name: str, device: Mapping[str, Any], tokens_per_forward: float) -> list[str]:
    memory, rate = device["memory_bytes"], device["bytes_per_second"]
    facts = ["memory unknown" if memory is None else readable_bytes(memory)]
    facts.append("bandwidth unknown: give --bandwidth for rates" if rate is None else f"{readable_bytes(rate)}/s")
    lines = [f"on {name} ({', '.join(facts)})"]
    for format, row in device["formats"].items():
        words = []
        if row["fits"] is not None:
            length = row["max_context_length"]
            words.append(("fits" if row["fits"] else "too large") + (f", context up to {length:,}" if length else ""))
        if rate is not None:
            words.append(
                f"at most {row['max_tokens_per_second']:,.0f} tokens/s at {tokens_per_forward:g} a forward, "
                f"{row['max_tokens_per_second_autoregressive']:,.0f} auto-regressive"
            )
        lines.append(f"  {format:<18}{'; '.join(words)}")
    return lines
