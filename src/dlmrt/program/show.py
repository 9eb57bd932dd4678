"""A program as text: what `dlmrt show --program` prints and what the tests compare with golden files.

One line a node: outputs, operation, inputs, attributes. Indentation is nesting. Above it what the program reads and
keeps; below it nothing, so that two listings can be compared line by line.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlmrt.program.nodes import Buffer, Kernel, Node, Program, Rows, Value
from dlmrt.program.plan import plan
from dlmrt.program.record import describe


def show(program: Program) -> str:
    """The listing of `program`, ending in a newline."""
    buffers = program.buffers()
    lines = [f"program {program.name}"]
    weights = [buffer for buffer in buffers if buffer.kind == "weight"]
    lines.append(f"  weights  {len(weights)} tensors")
    scalars = [f"{buffer.name}:{buffer.dtype}" for buffer in buffers if buffer.kind == "scalar"]
    if scalars:
        lines += _wrapped("scalars", scalars)
    rows = {dim.symbol: dim for buffer in buffers for dim in buffer.shape if isinstance(dim, Rows)}
    lines += [f"  rows     {symbol} = {dim.count.name}, at most {dim.maximum}" for symbol, dim in rows.items()]
    lines += [
        f"  state    {buffer.name} {buffer.dtype}{describe(buffer.shape)}"
        for buffer in buffers
        if buffer.kind == "state"
    ]
    lines.append(f"  scratch  {plan(program).describe()}")
    lines += _nodes(program.body, depth=0)
    return "\n".join(lines) + "\n"


def _wrapped(title: str, words: list[str], width: int = 116) -> list[str]:
    lines, line = [], f"  {title:<8}"
    for word in words:
        if len(line) + 1 + len(word) > width:
            lines.append(line)
            line = f"  {'':<8}"
        line += f" {word}"
    return [*lines, line]


def _nodes(body: tuple[Node, ...], *, depth: int) -> list[str]:
    indent, lines = "  " * depth, []
    for node in body:
        if isinstance(node, Kernel):
            lines.append(indent + _kernel(node))
        else:
            lines.append(f"{indent}{type(node).__name__.lower()} {node.flag.name}:")
            lines += _nodes(node.body, depth=depth + 1)
    return lines


def _kernel(node: Kernel) -> str:
    outputs = ", ".join(_written(buffer) for buffer in node.outputs.values())
    operands = ", ".join(_operand(role, buffer) for role, buffer in node.inputs.items())
    span = "" if node.span is None else f" span {node.span}{', waits' if node.waits else ''}"
    return f"{outputs} = {node.op}({operands}){_attributes(node.attributes)}{span}"


def _written(buffer: Buffer) -> str:
    """An output; scratch carries its type and shape, everything else is described at the top."""
    return f"{buffer.name}:{buffer.dtype}{describe(buffer.shape)}" if buffer.kind == "scratch" else buffer.name


def _operand(role: str, buffer: Buffer) -> str:
    name = buffer.name.removeprefix("model.").removesuffix(".weight")
    return name if role == name else f"{role}={name}"


def _attributes(attributes: Mapping[str, Value]) -> str:
    return f" {{{', '.join(f'{name}={value}' for name, value in attributes.items())}}}" if attributes else ""
