"""Child side of the sandbox: shut the doors in this process, then run the program that came on standard input.

Runs as `python -I -S`, so it imports the standard library only and nothing of this project. Order matters: namespaces
need the privileges that are dropped after them, and the system call filter comes last because it refuses the calls
that the earlier layers are built with. Each layer that stands is named on the status pipe before the program starts;
what the program prints can therefore not be taken for it. Layers that the host refuses are left out of that list, and
the ones below still stand:

- "namespaces": own network (no interface up), process, IPC and mount namespaces; a root made of an empty read-only
  tmpfs, the standard library read-only, and a 4 MB tmpfs as working folder;
- "landlock": where there is no own root, the kernel lets this process read the standard library and nothing else, and
  write beneath the working folder only;
- "uid": root becomes nobody; "no-caps": no capability, none to be gained;
- "rlimits", "seccomp" (no sockets, processes, signals, mounts, tracing), "audit" (Python's own events, the same list).

**Source:** ours; Linux man-pages unshare(2), pivot_root(2), mount_setattr(2), landlock(7), seccomp(2), capset(2).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys

TYPE_CHECKING = False  # importing typing would lengthen every start
if TYPE_CHECKING:
    from typing import Any

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446

# Numbers of the refused system calls; the file-based ones are left to the file system layers.
DENIED = {
    "x86_64": (
        0xC000003E,
        # sockets, System V and POSIX IPC
        (41, 42, 43, 49, 50, 53, 288, 29, 64, 68, 240),
        # new processes and programs, process groups, signals, tracing
        (56, 57, 58, 59, 322, 435, 109, 112, 62, 129, 200, 234, 297, 424, 434, 438, 101, 310, 311, 312),
        # mounts, namespaces, kernel facilities with a history of holes
        (155, 161, 165, 166, 272, 308, 428, 429, 430, 432, 442, 248, 249, 250, 298, 321, 323, 425, 426, 427),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 203, 202, 200, 201, 199, 242, 194, 190, 186, 180),
        (220, 221, 281, 435, 154, 157, 129, 138, 130, 131, 240, 424, 434, 438, 117, 270, 271, 272),
        (41, 51, 40, 39, 97, 268, 428, 429, 430, 432, 442, 217, 218, 219, 241, 280, 282, 425, 426, 427),
    ),
}
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}

AUDIT_DENIED = (
    "socket.",
    "ctypes.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.spawn",
    "os.posix_spawn",
    "os.kill",
    "os.killpg",
    "pty.",
    "os.setxattr",
    "os.removexattr",
    "signal.pthread_kill",
    "syslog.",
    "fcntl.",
)
# Audit events that change the file named by their first (and second) argument.
AUDIT_PATHS = frozenset(
    "os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate os.chmod os.chown os.utime os.chflags".split()
)
PRELOADED = "math re random itertools functools collections string heapq bisect json operator typing".split()

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """Call a system call by number; integers are passed at full width."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return int(libc.syscall(ctypes.c_long(number), *wide))


def checked(result: int, what: str) -> int:
    """Raise OSError when a libc call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    checked(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def enter_namespaces(avoid: list[str]) -> bool:
    """Leave the host's namespaces; an ordinary user does so through an own user namespace."""
    if "namespaces" in avoid:
        return False
    flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and libc.unshare(flags) == 0:
        return True
    if uid == 0 or libc.unshare(flags | CLONE_NEWUSER) != 0:
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:  # some hosts allow the user namespace and nothing in it; the own root then fails as well
        pass
    return True


def enter_private_root(folder: str) -> None:
    """Make `folder` the root: an empty read-only tmpfs with the standard library and a writable /box."""
    library = os.path.dirname(os.__file__)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    # Bound before the tmpfs covers the folder, in case the library lies beneath the same temporary folder.
    library_fd = os.open(library, os.O_PATH | os.O_DIRECTORY)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=64k,mode=755")
    inner = folder + library
    os.makedirs(inner, mode=0o755)
    os.mkdir(folder + "/box")
    mount(f"/proc/self/fd/{library_fd}", inner, None, MS_BIND | MS_REC)
    os.close(library_fd)
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    call = syscall(SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(inner), AT_RECURSIVE, attributes, len(attributes))
    checked(call, "mount_setattr")
    mount("tmpfs", folder + "/box", "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,nr_inodes=256,mode=777")
    os.chdir(folder)
    checked(syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    checked(libc.umount2(b".", MNT_DETACH), "umount2")
    mount(None, "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir("/box")


def make_file_rules(folder: str) -> int:
    """Make a Landlock ruleset: read beneath the standard library, write beneath `folder`; -1 when not there.

    Made while still root, because nobody may have no way to the standard library of a root-owned interpreter.
    """
    version = syscall(SYS_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return -1
    read_file, read_folder = 1 << 2, 1 << 3
    handled = (1 << (13 if version == 1 else 14 if version == 2 else 15)) - 1
    ruleset = syscall(SYS_LANDLOCK_CREATE, struct.pack("Q", handled), 8, 0)
    for path, rights in ((os.path.dirname(os.__file__), read_file | read_folder), (folder, handled & ~1)):
        path_fd = os.open(path, os.O_PATH)
        if ruleset >= 0 and syscall(SYS_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, path_fd), 0) != 0:
            ruleset = -1
        os.close(path_fd)
    return ruleset


def become_nobody() -> bool:
    """Give up root for good; True when there was root to give up."""
    if os.geteuid() != 0:
        return False
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    return True


def drop_capabilities() -> bool:
    """Empty every capability set; True when it worked."""
    for number in range(64):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    return syscall(SYS_CAPSET[os.uname().machine], header, bytes(24)) == 0


def set_limits(limits: dict[str, int]) -> None:
    """Set soft and hard resource limits; `nproc` 1 stops an ordinary user's forks even without the call filter."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def filter_calls() -> bool:
    """Refuse the DENIED system calls with EPERM (seccomp); False when the machine or the kernel is not known."""
    if os.uname().machine not in DENIED:
        return False
    arch, *groups = DENIED[os.uname().machine]
    numbers = [number for group in groups for number in group]
    load, jump_equal, jump_above, give = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    program.append((jump_above, len(numbers) + 1, 0, 0x40000000))  # the x32 variant of every call
    program += [(jump_equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0)


def watch_events(folder: str) -> None:
    """Refuse Python events that leave the box, as a second line and for clear messages."""
    prefix = os.path.join(folder, "")
    write_flags = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    realpath, join, fsdecode = os.path.realpath, os.path.join, os.fsdecode

    def is_outside(path: object) -> bool:
        if not isinstance(path, (str, bytes)):
            return not isinstance(path, int)
        return not realpath(join(folder, fsdecode(path))).startswith(prefix)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(AUDIT_DENIED):
            raise PermissionError(f"the sandbox does not allow {event}")
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & write_flags and is_outside(path):
                raise PermissionError(f"the sandbox does not allow writing outside its folder: {path!r}")
        elif event in AUDIT_PATHS and any(is_outside(path) for path in arguments[:2] if isinstance(path, (str, bytes))):
            raise PermissionError(f"the sandbox does not allow {event} outside its folder")

    sys.addaudithook(hook)


def run(source: str) -> int:
    """Run the program as `__main__` and return its exit status."""
    try:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # this function's own frame is of no interest
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def guard(job: dict[str, Any], status_fd: int, has_namespaces: bool) -> str:
    """Raise the remaining layers, report them, and return the source to run."""
    avoid, folder = job["avoid"], job["folder"]
    layers, file_rules = [], -1
    if has_namespaces and "root" not in avoid:
        try:
            enter_private_root(folder)
            layers.append("namespaces")
        except OSError:
            pass  # not reported, so the layers below have to carry alone
    if layers:
        folder = "/box"
    else:
        for name in PRELOADED:  # they may be out of reach afterwards
            __import__(name)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        os.chdir(folder)
        if "landlock" not in avoid:
            file_rules = make_file_rules(folder)
    if "uid" not in avoid and become_nobody():
        layers.append("uid")
    follow_parent(job["parent"] if not has_namespaces else 0)  # after the change of user, which would undo it
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if file_rules >= 0 and syscall(SYS_LANDLOCK_RESTRICT, file_rules, 0) == 0:
        layers.append("landlock")
        os.close(file_rules)
    if drop_capabilities():
        layers.append("no-caps")
    set_limits(job["limits"])
    layers.append("rlimits")
    if "seccomp" not in avoid and filter_calls():
        layers.append("seccomp")
    watch_events(folder)
    layers.append("audit")
    os.write(status_fd, json.dumps(layers).encode())
    os.close(status_fd)
    return str(job["source"])


def follow_parent(parent: int) -> None:
    """Die with the parent process; `parent` is its expected id, 0 for a parent outside our process namespace."""
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main() -> None:
    """Read the job, split off a child that is first in its process namespace, and pass on its exit status."""
    status_fd = int(sys.argv[1])
    job = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    follow_parent(job["parent"])
    has_namespaces = enter_namespaces(job["avoid"])
    child = 0
    if has_namespaces:
        # On SIGTERM the child is killed and reaped here, so that no zombie is left to a container's idle init.
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL) if child > 0 else None)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = run(guard(job, status_fd, has_namespaces))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
    os.close(status_fd)
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


main()
