"""The sandbox judges hostile programs in time and leaves nothing behind (K65)."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from orl.errors import SandboxUnavailableError
from orl.tasks import sandbox
from orl.tasks.sandbox import MAX_OUTPUT_BYTES, SandboxResult, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

# Layers left out, so that the ones below are tested too: everything; as in a container that forbids namespaces;
# namespaces without mounts; no system call filter, so that the namespaces and limits carry alone.
MODES = {
    "full": (),
    "no-namespaces": ("namespaces",),
    "no-private-root": ("root",),
    "no-call-filter": ("seccomp",),
}
TIMEOUT_S = 1.0


@pytest.fixture(params=MODES, ids=str)
def run(request: pytest.FixtureRequest):
    """Run a program in one of the modes."""

    def call(source: str, timeout_s: float = TIMEOUT_S) -> SandboxResult:
        return sandbox._run(source, timeout_s=timeout_s, memory_bytes=256 << 20, avoid=MODES[request.param])

    return call


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A temporary folder and a copy of the child script of our own, so that what is left behind is known as ours."""
    folder = Path(tempfile.mkdtemp(prefix="test-sandbox-"))
    folder.chmod(0o755)
    child = folder / "child.py"
    child.write_text(sandbox._CHILD.read_text())
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    yield folder
    left, alive = sorted(path.name for path in folder.iterdir()), list(_processes(child))
    shutil.rmtree(folder)
    assert (left, alive) == (["child.py"], [])


@pytest.fixture
def outside():
    """A folder on the host that every user may write to, or the file rights alone would protect it."""
    folder = Path(tempfile.mkdtemp(prefix="test-outside-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def _processes(child: Path):
    """Ids of processes that run the child script, and of zombies of this process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_ours = str(child).encode() in (entry / "cmdline").read_bytes()
                if is_ours or f") Z {os.getpid()} " in (entry / "stat").read_text():
                    yield entry.name
            except OSError:
                continue


def test_plain_program(run) -> None:
    source = "import math, re\nprint(math.gcd(12, 18))\nopen('note', 'w').write('x')\nprint(open('note').read())"
    result = run(source)
    assert (result.stdout, result.returncode, result.ended) == ("6\nx\n", 0, "exit"), result.stderr
    assert {"rlimits", "audit"} <= set(result.isolation)


def test_isolation_is_reported() -> None:
    result = run_python("print(1)")
    assert sandbox._WRITE_LAYERS & set(result.isolation)
    assert sandbox._PROCESS_LAYERS & set(result.isolation)


def test_exit_status_and_error_text(run) -> None:
    assert run("import sys; sys.exit(7)").returncode == 7
    result = run("def f():\n    return 1 / 0\nf()")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr and "child.py" not in result.stderr


def test_endless_loop_times_out(run) -> None:
    start_s = time.monotonic()
    assert run("while True: pass", 0.3).ended == "timeout"
    assert time.monotonic() - start_s < 10.0  # the start, which takes what it takes, does not count


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(60)",
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
        "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
    ],
)
def test_sleepers_time_out(run, source: str) -> None:
    assert run(source, 0.25).ended == "timeout"


def test_fork_bomb(run) -> None:
    result = run("import os\nwhile True:\n    try:\n        os.fork()\n    except BaseException: pass", 0.3)
    assert result.ended == "timeout"


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.fork(); print('done')",
        "import _posixsubprocess as p, os\nr, w = os.pipe()\n"
        "p.fork_exec([b'/bin/true'], [b'/bin/true'], True, (w,), None, [], -1, -1, -1, -1, -1, -1, r, w, False, False,"
        " -1, None, None, None, -1, None, False)\nprint('done')",
        "import subprocess; subprocess.run(['/bin/true']); print('done')",
        "import os; os.system('true') == 0 and print('done')",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.setsid(); print('done')",
        "import _thread; _thread.start_new_thread(print, ('done',))",
    ],
)
def test_no_new_processes(source: str) -> None:
    result = run_python(source)
    assert result.ended == "exit" and "done" not in result.stdout


def test_memory_bomb(run) -> None:
    result = run("x = bytearray(8 << 30)\nprint('got it')")
    assert result.returncode == 1 and "MemoryError" in result.stderr


def test_huge_output_is_bounded(run) -> None:
    start_s = time.monotonic()
    result = run("import sys\nblock = 'x' * (1 << 20)\nfor _ in range(1024): sys.stdout.write(block)", 5.0)
    assert result.ended == "output limit" and len(result.stdout) == MAX_OUTPUT_BYTES
    assert time.monotonic() - start_s < 2.0


def test_huge_file_is_bounded(run) -> None:
    result = run("with open('big', 'wb') as file:\n    for _ in range(64): file.write(bytes(1 << 20))")
    assert result.returncode == 1 and "File too large" in result.stderr


@pytest.mark.parametrize("call", ["open({0!r}, 'w').write('x')", "os.open({0!r}, os.O_WRONLY | os.O_CREAT)"])
def test_no_writes_outside(run, outside: Path, call: str) -> None:
    target = outside / "file"
    target.write_text("before")
    target.chmod(0o666)
    for path in (target, outside / "new", "/tmp/orl-outside", "../up"):
        result = run(f"import os\n{call.format(str(path))}")
        assert result.returncode == 1, path
    for verb in ("os.remove({0!r})", "os.rename({0!r}, 'x')", "os.chmod({0!r}, 0)", "os.truncate({0!r}, 0)"):
        assert run(f"import os\n{verb.format(str(target))}").returncode == 1
    assert target.read_text() == "before" and os.listdir(outside) == ["file"]
    assert not Path("/tmp/orl-outside").exists()


@pytest.mark.parametrize("mode", [(), ("namespaces",), ("root",)], ids=str)
def test_kernel_keeps_files_when_python_hooks_are_beaten(mode: tuple, outside: Path, monkeypatch) -> None:
    """Without the audit hook, the kernel's layers alone keep reads and writes away."""
    child = outside / "child.py"
    child.write_text(sandbox._CHILD.read_text().replace("sys.addaudithook(hook)", "pass"))
    monkeypatch.setattr(sandbox, "_CHILD", child)
    secret = outside / "secret"
    secret.write_text("token-123")
    secret.chmod(0o666)
    tries = [
        f"print(open({str(secret)!r}).read())",
        f"open({str(secret)!r}, 'w')",
        f"open({str(outside / 'new')!r}, 'w')",
        "import socket; socket.create_connection(('127.0.0.1', 1), 0.2)",
        "import os; os.kill(os.getppid() or 1, 9)",
        "import os; os.fork()",
    ]
    program = "".join(f"try:\n    {text}\n    print('open')\nexcept (OSError, ImportError): pass\n" for text in tries)
    result = sandbox._run(program, timeout_s=2.0, memory_bytes=256 << 20, avoid=mode)
    assert (result.stdout, result.returncode) == ("", 0), result
    assert secret.read_text() == "token-123"


def test_environment_is_empty(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    source = (
        "import os\ntext = repr(dict(os.environ)).encode()\n"
        f"for pid in ('self', '1', {os.getpid()}):\n"
        "    try: text += open(f'/proc/{pid}/environ', 'rb').read()\n    except OSError: pass\n"
        "print(b'secret-token' in text, 'HF_TOKEN' in os.environ)"
    )
    assert run(source).stdout == "False False\n"


def test_no_network(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 0.3)\nprint('connected')")
    assert result.returncode == 1 and "connected" not in result.stdout


def test_cannot_kill_or_trace_the_parent(run) -> None:
    for who in ("os.getppid()", str(os.getpid()), "-1", "0"):
        result = run(f"import os\nos.kill({who}, 9)\nprint('killed')")
        assert "killed" not in result.stdout and result.ended == "exit"
    result = run("import ctypes\nctypes.CDLL(None).kill(1, 9)\nprint('killed')")
    assert "killed" not in result.stdout


def test_status_cannot_be_forged(run) -> None:
    result = run("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'[\"forged\"]')\n    except OSError: pass")
    assert "forged" not in result.isolation and "audit" in result.isolation


def test_dies_with_its_parent(place: Path) -> None:
    """A killed parent leaves no sandboxed program running."""
    code = (
        "import pathlib\nfrom orl.tasks import sandbox\n"
        f"sandbox._CHILD = pathlib.Path({str(sandbox._CHILD)!r})\nprint('up', flush=True)\n"
        "sandbox.run_python('import time; time.sleep(30)', timeout_s=30)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2]), "TMPDIR": str(place)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        deadline_s = time.monotonic() + 10
        while not list(_processes(sandbox._CHILD)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        time.sleep(0.1)
        parent.kill()
    while list(_processes(sandbox._CHILD)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    for left in place.glob("orl-sandbox-*"):  # the killed parent could not remove its empty folder
        left.rmdir()


def test_a_sandbox_that_does_not_come_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("raise OSError('no way')")
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    with pytest.raises(SandboxUnavailableError, match="no way"):
        run_python("print(1)")


def test_a_weak_sandbox_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weak = tmp_path / "child.py"
    weak.write_text('import os, sys\nos.write(int(sys.argv[1]), b\'["rlimits", "audit"]\')')
    monkeypatch.setattr(sandbox, "_CHILD", weak)
    with pytest.raises(SandboxUnavailableError, match="too weak"):
        run_python("print(1)")


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailableError, match="needs Linux"):
        run_python("print(1)")


def test_isolation_is_plain_data() -> None:
    assert json.loads(json.dumps(run_python("print(1)").isolation))


def test_a_slow_start_does_not_count_against_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's clock starts when its isolation stands, and a child that took too long gets a second attempt."""
    slow = tmp_path / "slow_child.py"
    delay = (
        f"import time\nfirst = not os.path.exists({str(tmp_path / 'seen')!r})\n"
        f"open({str(tmp_path / 'seen')!r}, 'w').close()\ntime.sleep(30 if first else 2.2)\nmain()\n"
    )
    slow.write_text(sandbox._CHILD.read_text().removesuffix("main()\n") + delay)
    monkeypatch.setattr(sandbox, "_CHILD", slow)
    monkeypatch.setattr(sandbox, "_START_S", (0.5, 60.0))
    result = sandbox.run_python("print(2)", timeout_s=2.0)
    assert (result.ended, result.stdout) == ("exit", "2\n")
    monkeypatch.setattr(sandbox, "_START_S", (0.1, 0.2))
    (tmp_path / "seen").unlink()
    with pytest.raises(SandboxUnavailableError, match=r"did not come up within 0.2 s; run fewer processes"):
        sandbox.run_python("print(2)", timeout_s=5.0)
