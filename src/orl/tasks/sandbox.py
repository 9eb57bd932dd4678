"""Run untrusted Python in a child process that can neither harm the host nor outlive the call (Linux).

The parent starts `python -I -S` with an empty environment in a session of its own, hands the program over on standard
input, reads a bounded amount of output against a wall clock that starts when the isolation stands, and kills the whole
group at the end, whatever the ending. The child's side, `_sandbox_child.py`, builds the isolation and names the layers
that stand. Starting a fresh interpreter costs tens of milliseconds, seconds on an overloaded machine, which must not
count against the program; a warm pool was left out because a used process cannot be proved clean.

**Source:** ours; the checks follow the list in bigcode-evaluation-harness issue 290.
"""

import contextlib
import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from orl.errors import SandboxUnavailableError

MAX_OUTPUT_BYTES = 64 << 10  # of standard output and of standard error, each
MAX_FILE_BYTES = 1 << 20
_REAP_S = 0.3
_START_S = (10.0, 60.0)  # what the child may take to come up, at the first and at the last attempt
_CHILD = Path(__file__).with_name("_sandbox_child.py")
_WRITE_LAYERS = frozenset({"namespaces", "landlock", "uid"})  # one of these must keep host files safe
_PROCESS_LAYERS = frozenset({"namespaces", "seccomp"})  # one of these must keep network and processes away


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """How one sandboxed run ended.

    Example:
        SandboxResult(stdout="42\\n", stderr="", returncode=0, ended="exit", wall_s=0.041,
                      isolation=("namespaces", "uid", "no-caps", "rlimits", "seccomp", "audit"))
    """

    stdout: str  # at most MAX_OUTPUT_BYTES, undecodable bytes replaced
    stderr: str  # at most MAX_OUTPUT_BYTES, undecodable bytes replaced
    returncode: int | None  # exit status, 128 + signal number when killed by one; None unless `ended` is "exit"
    ended: str  # "exit", "timeout" or "output limit"
    wall_s: float  # from start to end, interpreter start included
    isolation: tuple[str, ...]  # layers that stood before the program began, see `_sandbox_child.py`


def run_python(source: str, *, timeout_s: float = 2.0, memory_bytes: int = 256 << 20) -> SandboxResult:
    """Run a program and return its output.

    Args:
        source: Program text, run as `__main__` with the standard library only.
        timeout_s: Wall clock limit of the program, from when its isolation stands.
        memory_bytes: Limit of the address space; a fresh interpreter takes about 30 MB.

    Raises:
        SandboxUnavailableError: Not on Linux, the layers that protect the host could not be raised, or the child did
            not come up in time, twice.
    """
    return _run(source, timeout_s=timeout_s, memory_bytes=memory_bytes, avoid=())


def _run(source: str, *, timeout_s: float, memory_bytes: int, avoid: tuple[str, ...]) -> SandboxResult:
    """As `run_python`; `avoid` names layers to leave out, so that tests can look at the ones below."""
    for start_s in _START_S:
        result = _attempt(source, start_s=start_s, timeout_s=timeout_s, memory_bytes=memory_bytes, avoid=avoid)
        if result.isolation:
            return result
    raise SandboxUnavailableError(
        f"the code sandbox did not come up within {_START_S[-1]:g} s; run fewer processes on this machine"
    )


def _attempt(
    source: str, *, start_s: float, timeout_s: float, memory_bytes: int, avoid: tuple[str, ...]
) -> SandboxResult:
    """One child; a result without isolation says that it did not come up within `start_s`."""
    if sys.platform != "linux":
        raise SandboxUnavailableError(f"the code sandbox needs Linux, this is {sys.platform}; use a Linux machine")
    cpu_s = math.ceil(timeout_s) + 1
    limits = {
        "CPU": cpu_s,
        "AS": memory_bytes,
        "FSIZE": MAX_FILE_BYTES,
        "NPROC": 1,
        "NOFILE": 64,
        "CORE": 0,
    }
    began_s = time.monotonic()
    folder = tempfile.mkdtemp(prefix="orl-sandbox-")
    status_read, status_write = os.pipe()
    process = None
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_CHILD), str(status_write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            pass_fds=(status_write,),
            start_new_session=True,
        )
        os.close(status_write)
        status_write = -1
        job = {
            "source": source,
            "folder": os.path.realpath(folder),
            "limits": limits,
            "avoid": list(avoid),
            "parent": os.getpid(),
        }
        job_bytes = json.dumps(job).encode("ascii")
        ended, output, status = _collect(process, job_bytes, status_read, start_s=start_s, timeout_s=timeout_s)
        wall_s = time.monotonic() - began_s
        _kill_group(process)
    finally:
        if process is not None:
            _kill_group(process)
        os.close(status_read)
        if status_write >= 0:
            os.close(status_write)
        shutil.rmtree(folder, ignore_errors=True)
    stdout, stderr = (data.decode("utf-8", "replace") for data in output)
    if not status and ended != "timeout":
        raise SandboxUnavailableError(f"the code sandbox did not come up; its child said: {stderr[-400:].strip()}")
    if status and not (_WRITE_LAYERS & set(status) and _PROCESS_LAYERS & set(status)) and not avoid:
        raise SandboxUnavailableError(f"the code sandbox is too weak here, only {status}; allow user namespaces")
    return SandboxResult(
        stdout=stdout,
        stderr=stderr,
        returncode=process.returncode if ended == "exit" else None,
        ended=ended,
        wall_s=wall_s,
        isolation=tuple(status),
    )


def _collect(
    process: subprocess.Popen[bytes], job: bytes, status_fd: int, *, start_s: float, timeout_s: float
) -> tuple[str, list[bytearray], list[str]]:
    """Feed the job and read both outputs until the end, the deadline or the output limit.

    Returns:
        How it ended, both outputs, and the layers that stood, none if the child did not come up.
    """
    assert process.stdin and process.stdout and process.stderr
    output, status = [bytearray(), bytearray()], bytearray()
    deadline_s = time.monotonic() + start_s
    unsent = memoryview(job)
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ, output[0])
        selector.register(process.stderr, selectors.EVENT_READ, output[1])
        selector.register(status_fd, selectors.EVENT_READ, status)
        while selector.get_map():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return "timeout", output, _layers(status)
            for key, _ in selector.select(left_s):
                if key.fileobj is process.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                    if not unsent:
                        selector.unregister(process.stdin)
                        with contextlib.suppress(BrokenPipeError):
                            process.stdin.close()
                    continue
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                    continue
                key.data.extend(data)
                if key.data is status:  # the isolation stands and the program begins
                    deadline_s = time.monotonic() + timeout_s
                elif len(key.data) > MAX_OUTPUT_BYTES:
                    del key.data[MAX_OUTPUT_BYTES:]
                    return "output limit", output, _layers(status)
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:  # it closed its outputs and went on
        return "timeout", output, _layers(status)
    return "exit", output, _layers(status)


def _layers(status: bytearray) -> list[str]:
    """What the child named; it writes its list at once."""
    return [str(layer) for layer in json.loads(status or b"[]")]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the child's session and reap the child."""
    if process.returncode is None:
        process.terminate()  # lets the outer child kill and reap the inner one
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
