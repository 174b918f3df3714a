"""The system calls that sandboxed code may make, as a seccomp program.

Four answers, from a table of names. *Allowed* calls go through. *Recorded* ones (attempts at the network, at other
processes, at mounts, at the kernel) wait until the supervisor has recorded them and then fail; without a listening
supervisor they just fail. *Quiet* ones fail without a record, because the C library tries them of its own accord. Every
other call, known or not yet invented, does not exist (ENOSYS), which is what libraries expect of an old kernel.

The program is a binary search over ranges of call numbers: some eight comparisons for any call.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence

from interlock.executors.sandbox import syscalls

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close close_range
stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir
fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat chmod fchmod
fchmodat fchmodat2 chown fchown lchown fchownat umask truncate ftruncate fallocate fsync fdatasync sync_file_range
syncfs utime utimes utimensat futimesat statfs fstatfs lseek sendfile copy_file_range readahead fadvise64 flock mknod
mknodat getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr setxattr lsetxattr fsetxattr removexattr
lremovexattr fremovexattr dup dup2 dup3 fcntl pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1
epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime
timerfd_gettime inotify_init inotify_init1 inotify_add_watch inotify_rm_watch mmap munmap mremap mprotect madvise brk
msync mincore mlock munlock mlock2 mlockall munlockall membarrier mseal memfd_create pkey_alloc pkey_free
pkey_mprotect rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigqueueinfo
rt_tgsigqueueinfo sigaltstack kill tkill tgkill pause alarm getitimer setitimer timer_create timer_settime
timer_gettime timer_getoverrun timer_delete nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
times getpid gettid getppid getuid geteuid getgid getegid getgroups getresuid getresgid getpgid getpgrp getsid setpgid
setsid setuid setgid setreuid setregid setresuid setresgid setfsuid setfsgid setgroups capget capset getrlimit
setrlimit prlimit64 getrusage getpriority setpriority sysinfo uname getcpu getrandom sched_yield sched_getaffinity
sched_setaffinity sched_getparam sched_setparam sched_getscheduler sched_setscheduler sched_get_priority_max
sched_get_priority_min sched_rr_get_interval sched_getattr sched_setattr futex futex_waitv futex_wake futex_wait
futex_requeue set_robust_list get_robust_list set_tid_address rseq restart_syscall arch_prctl exit exit_group wait4
waitid fork vfork pidfd_open pidfd_send_signal prctl ioprio_get execve execveat sendto recvfrom sendmsg recvmsg
sendmmsg recvmmsg shutdown getsockopt setsockopt getsockname getpeername
""".split()  # noqa: SIM905 - a table of names reads better as words

_RECORDED = """
ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd bpf perf_event_open userfaultfd keyctl add_key request_key
unshare setns mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick
mount_setattr init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff syslog acct
settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname quotactl quotactl_fd open_by_handle_at
name_to_handle_at fanotify_init fanotify_mark iopl ioperm bind listen accept accept4 connect seccomp process_madvise
process_mrelease memfd_secret shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
""".split()  # noqa: SIM905 - a table of names reads better as words

# System calls for the network.
NETWORK = frozenset(("socket", "connect", "bind", "listen", "accept", "accept4", "socketpair"))

_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_NAMESPACES = 0x7E020000
_PUSH_INPUT, _LINUX_CONSOLE = 0x5412, 0x541C
_CURRENT_PERSONALITY = 0xFFFFFFFF
_STREAM, _PACKETS, _NONBLOCK, _CLOEXEC = 1, 5, 0x800, 0x80000
# Kinds of sockets that can only send to their other end.
_CONNECTED = tuple(kind | flags for kind in (_STREAM, _PACKETS) for flags in (0, _NONBLOCK, _CLOEXEC, 0x80800))
_SHARED, _ANONYMOUS = 0x01, 0x20
_SET_PIPE_SIZE = 1031
_SET_LEASE = 1024
_CREATES = 0o100 | 0o20000000  # O_CREAT, and the bit that tells O_TMPFILE from a directory
_RIGHTS_OF_OWNER = 0o6000  # the bits by which a program runs with the rights of its file's owner or group

_LOAD, _JUMP, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _NOTIFY, _ERROR = 0x7FFF0000, 0x80000000, 0x7FC00000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

Code = tuple[bytes, ...]


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, then, otherwise, value & 0xFFFFFFFF)


def _answer(action: int) -> Code:
    return (_step(_RETURN, action),)


def _fails(error: int) -> Code:
    return _answer(_ERROR | error)


def _if_argument(index: int, values: Sequence[int], then: Code, otherwise: Code) -> Code:
    """Return one answer if an argument is among the values, another if it is not."""
    assert len(then) == len(otherwise) == 1
    tests = [_step(_IF_EQUAL, value, len(values) - place) for place, value in enumerate(values)]
    return (_step(_LOAD, _ARGUMENTS + 8 * index), *tests, *otherwise, *then)


def _if_either(
    index: int, values: Sequence[int], then: Code, others: Sequence[int], instead: Code, otherwise: Code
) -> Code:
    """Return one answer for some values of an argument, another for others, a third for the rest."""
    assert len(then) == len(instead) == len(otherwise) == 1
    count = len(values) + len(others)
    tests = [_step(_IF_EQUAL, value, count - place) for place, value in enumerate(values)]
    tests += [_step(_IF_EQUAL, value, count - len(values) - place + 1) for place, value in enumerate(others)]
    return (_step(_LOAD, _ARGUMENTS + 8 * index), *tests, *otherwise, *then, *instead)


def _if_both(first: tuple[int, Sequence[int]], second: tuple[int, Sequence[int]], then: Code, otherwise: Code) -> Code:
    """Return one answer if two arguments are each among their values, another if either is not."""
    (index, (value,)), inner = first, _if_argument(*second, then, otherwise)
    # The answer for the rest stands before the last of the inner test.
    return (_step(_LOAD, _ARGUMENTS + 8 * index), _step(_IF_EQUAL, value, 0, len(inner) - 2), *inner)


def _if_all_bits(index: int, bits: Sequence[int], then: Code, otherwise: Code) -> Code:
    """Return one answer if an argument has all these bits, another if it lacks one."""
    assert len(then) == len(otherwise) == 1
    tests = [_step(_IF_ANY_BIT, bit, 0, len(bits) - place) for place, bit in enumerate(bits)]
    return (_step(_LOAD, _ARGUMENTS + 8 * index), *tests, *then, *otherwise)


def build(tier: int, *, metered: bool, recording: bool, machine: str | None = None) -> bytes:
    """Build the program for a tier.

    `metered`: a cgroup counts the memory of the whole tree and shares the processor. Without it, memory that belongs to
    no process is not available, and the processors cannot be chosen.
    """
    machine = machine or platform.machine()
    numbers = syscalls.NUMBERS[machine]
    answers = sorted(
        (numbers[name], code) for name, code in _rules(tier, metered, recording).items() if name in numbers
    )
    start = (_step(_LOAD, _ARCHITECTURE), _step(_IF_EQUAL, _AUDIT_ARCHITECTURE[machine], 1), *_answer(_KILL))
    # The second call table of x86_64 would bypass every number in ours.
    no_x32 = (_step(_IF_AT_LEAST, _X32, 0, 1), *_answer(_KILL)) if machine == "x86_64" else ()
    return b"".join((*start, _step(_LOAD, _NUMBER), *no_x32, *_search(_ranges(answers))))


def _rules(tier: int, metered: bool, recording: bool) -> Mapping[str, Code]:
    allow, refuse = _answer(_ALLOW), _answer(_NOTIFY) if recording else _fails(errno.EPERM)
    rules: dict[str, Code] = {}
    rules |= dict.fromkeys(_ALLOWED, allow) | dict.fromkeys(_RECORDED, refuse)
    rules["clone"] = (_step(_LOAD, _ARGUMENTS), _step(_IF_ANY_BIT, _NAMESPACES, 1), *allow, *refuse)
    rules["ioctl"] = _if_argument(1, (_PUSH_INPUT, _LINUX_CONSOLE), _fails(errno.EPERM), allow)
    rules["personality"] = _if_argument(0, (0, _CURRENT_PERSONALITY), allow, _fails(errno.EPERM))
    # A pair is for a process and its own children. One of datagrams could be used to send to any socket in sight.
    rules["socketpair"] = _if_both((0, (_UNIX,)), (1, _CONNECTED), allow, refuse)
    rules["socket"] = _if_argument(0, (_UNIX, _NETLINK), _fails(errno.EACCES), refuse)
    if tier >= 2:
        # A namespace of its own, in which only the proxy answers, confines a tier 2 call; the record is for the class.
        # Sockets of the host's file system are in no network namespace: none that could reach one is made.
        rules["socket"] = _if_either(0, (_INET, _INET6, _NETLINK), allow, (_UNIX,), _fails(errno.EACCES), refuse)
        rules["connect"] = refuse if tier == 2 and recording else allow
        rules["bind"] = allow
    if tier == 3:
        rules |= dict.fromkeys(("listen", "accept", "accept4"), allow)
        rules["socket"] = _if_argument(0, (_UNIX, _INET, _INET6, _NETLINK), allow, refuse)
        rules["socketpair"] = _if_argument(0, (_UNIX,), allow, refuse)
    if not metered:
        # Memory that belongs to no process is not counted.
        rules["memfd_create"] = _fails(errno.ENOSYS)
        rules["mmap"] = _if_all_bits(3, (_ANONYMOUS, _SHARED), _fails(errno.EPERM), allow)
        rules["fcntl"] = _if_argument(1, (_SET_PIPE_SIZE,), _fails(errno.EPERM), allow)
        rules["sched_setaffinity"] = _fails(errno.EPERM)
    return rules


def no_messages(machine: str | None = None) -> bytes:
    """Build a program that prevents only the sending of descriptors.

    A descriptor in flight belongs to no process, and neither does the content of the buffer behind it.
    """
    numbers = syscalls.NUMBERS[machine or platform.machine()]
    sending = [_step(_IF_EQUAL, numbers["sendmsg"], 2), _step(_IF_EQUAL, numbers["sendmmsg"], 1)]
    return b"".join((_step(_LOAD, _NUMBER), *sending, *_answer(_ALLOW), *_fails(errno.EPERM)))


def plain_files(machine: str | None = None) -> bytes:
    """Build a program for a call that writes to a directory of the host: it can make files and directories, nothing
    else.

    No symbolic link, which somebody outside could follow; no FIFO, socket or device; no file that runs with the rights
    of its owner, which is the server's user; no lease, which makes others wait for a file.
    """
    numbers = syscalls.NUMBERS[machine or platform.machine()]
    allow, refuse = _answer(_ALLOW), _fails(errno.EPERM)
    rules: dict[str, Code] = dict.fromkeys(("symlink", "symlinkat", "mknod", "mknodat"), refuse)
    rules["openat2"] = _fails(errno.ENOSYS)  # its mode is in memory, where no filter sees it
    rules["fcntl"] = _if_argument(1, (_SET_LEASE,), refuse, allow)
    for name, mode in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("fchmodat2", 2), ("creat", 1)):
        rules[name] = _if_any_bit(mode, _RIGHTS_OF_OWNER, refuse, allow)
    for name, flags in (("open", 1), ("openat", 2)):
        sets_mode = _if_any_bit(flags + 1, _RIGHTS_OF_OWNER, refuse, allow)
        # The answer for a file that is not made is the last of the inner test.
        skip = len(sets_mode) - 1
        rules[name] = (_step(_LOAD, _ARGUMENTS + 8 * flags), _step(_IF_ANY_BIT, _CREATES, 0, skip), *sets_mode)
    program: list[bytes] = [_step(_LOAD, _NUMBER)]
    for name, code in rules.items():
        if name in numbers:
            program += [_step(_IF_EQUAL, numbers[name], 0, len(code)), *code]
    return b"".join((*program, *allow))


def _if_any_bit(index: int, bits: int, then: Code, otherwise: Code) -> Code:
    """Return one answer if an argument has any of these bits, another if it has none."""
    assert len(then) == len(otherwise) == 1
    return (_step(_LOAD, _ARGUMENTS + 8 * index), _step(_IF_ANY_BIT, bits, 0, 1), *then, *otherwise)


def _ranges(answers: Sequence[tuple[int, Code]]) -> list[tuple[int, Code]]:
    """Return all numbers as ranges: the start and the answer of each. Gaps are calls that do not exist."""
    missing = _fails(errno.ENOSYS)
    ranges: list[tuple[int, Code]] = []
    following = 0
    for number, code in answers:
        if number > following:
            ranges.append((following, missing))
        if not ranges or ranges[-1][1] != code:
            ranges.append((number, code))
        following = number + 1
    return [*ranges, (following, missing)]


def _search(ranges: Sequence[tuple[int, Code]]) -> Code:
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    if len(below) < 256:
        return (_step(_IF_AT_LEAST, ranges[middle][0], len(below)), *below, *above)
    return (_step(_IF_AT_LEAST, ranges[middle][0], 0, 1), _step(_JUMP, len(below)), *below, *above)
