"""The environment variables of dlmrt: one typed field each, read once, refused when they do not parse.

A variable with the prefix `DLMRT_` that is not in the table is an error too: a misspelt name would otherwise change
nothing and say nothing. Variables of other projects that are honoured (`HF_HOME`, `NO_COLOR`, ...) are read by their
own libraries and only listed here, for `dlmrt env`.

Source: ours; names as in docs/cli.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dlmrt.errors import UnknownOptionError, UsageError, nearest

PREFIX = "DLMRT_"
LOG_LEVELS = ("debug", "info", "warning", "error")
CUDA_GRAPHS = ("loop", "step", "off")
HONOURED = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "OMP_NUM_THREADS", "NO_COLOR")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Values of the `DLMRT_*` variables; a field is named like its variable, in lower case and without the prefix.

    Example: ``Environment.read({"DLMRT_NUM_THREADS": "2"})`` is ``Environment(num_threads=2)``.
    """

    executor: str = "auto"  # who runs the loop; checked by the engine, which knows the names
    dtype: str = "auto"  # compute type; auto: the checkpoint's
    num_threads: int | None = None  # CPU threads where a caller asks for none; None: the executor's choice
    cuda_graph: str = "loop"  # how the cuda executor runs loops, one of CUDA_GRAPHS
    cpu_isa: str = ""  # instruction set of the cpu executor's kernels; empty: the best one that runs here
    rank_timeout: float = 20.0  # seconds that ranks of one model wait for each other in a collective
    log_level: str = "warning"  # one of LOG_LEVELS
    host: str = "127.0.0.1"  # of the server
    port: int = 8000  # of the server; 0: a free one
    api_key: str | None = None  # that requests to the server must carry
    testing: bool = False  # allows `fault`
    fault: str = ""  # faults that the server injects, see dlmrt.serve.faults; needs DLMRT_TESTING=1

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Parse `variables`, by default those of the process. An empty value counts as absent.

        Raises:
            UnknownOptionError: a `DLMRT_` variable that does not exist.
            UsageError: a value that does not parse; the message names the variable.
        """
        source = os.environ if variables is None else variables
        given = {name: value.strip() for name, value in source.items() if name.startswith(PREFIX) and value.strip()}
        known = {f"{PREFIX}{field.upper()}" for field in cls.__dataclass_fields__}
        for name in given:
            if name not in known:
                raise UnknownOptionError(f"{name} is not an environment variable of dlmrt{nearest(name, known)}")
        log_level = given.get("DLMRT_LOG_LEVEL", cls.log_level).lower()
        if log_level not in LOG_LEVELS:
            raise UsageError(f"DLMRT_LOG_LEVEL={log_level!r} is not a level; use one of {', '.join(LOG_LEVELS)}")
        cuda_graph = given.get("DLMRT_CUDA_GRAPH", cls.cuda_graph).lower()
        if cuda_graph not in CUDA_GRAPHS:
            raise UsageError(f"DLMRT_CUDA_GRAPH={cuda_graph!r} is not a mode; use one of {', '.join(CUDA_GRAPHS)}")
        testing = given.get("DLMRT_TESTING", "0")
        if testing not in ("0", "1"):
            raise UsageError(f"DLMRT_TESTING={testing!r} is not a switch; set 0 or 1")
        if "DLMRT_FAULT" in given and testing == "0":
            raise UsageError("DLMRT_FAULT injects faults and needs DLMRT_TESTING=1; unset it to serve people")
        return cls(
            executor=given.get("DLMRT_EXECUTOR", cls.executor),
            dtype=given.get("DLMRT_DTYPE", cls.dtype),
            num_threads=_whole(given, "DLMRT_NUM_THREADS", low=1),
            cuda_graph=cuda_graph,
            cpu_isa=given.get("DLMRT_CPU_ISA", cls.cpu_isa),
            rank_timeout=_seconds(given, "DLMRT_RANK_TIMEOUT", cls.rank_timeout),
            log_level=log_level,
            host=given.get("DLMRT_HOST", cls.host),
            port=_port(given),
            api_key=given.get("DLMRT_API_KEY"),
            testing=testing == "1",
            fault=given.get("DLMRT_FAULT", ""),
        )


def _whole(given: Mapping[str, str], name: str, *, low: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 18 or int(value) < low:
        raise UsageError(f"{name}={value!r} is not a whole number from {low} on; set e.g. {name}={low} or unset it")
    return int(value)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86_400:  # NaN is not within
        raise UsageError(f"{name}={given[name]!r} is not a number of seconds within [1, 86400]; set e.g. {name}=20")
    return value


def _port(given: Mapping[str, str]) -> int:
    port = _whole(given, "DLMRT_PORT", low=0)
    if port is not None and port > 65535:
        raise UsageError(f"DLMRT_PORT={port} is not a port; set 0 to 65535 (0: a free one)")
    return Environment.port if port is None else port
