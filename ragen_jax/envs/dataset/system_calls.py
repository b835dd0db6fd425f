"""The filter of system calls in the sandbox, for the kernel (seccomp).

It refuses calls that no graded program needs: those that give memory which no other limit counts, those that look into
other processes, rarely used parts of the kernel, where most of its faults are found, and sockets that are not local.
"""

from __future__ import annotations

import platform
import struct

# Name -> number on x86-64, and on 64-bit Arm (Linux: arch/x86/entry/syscalls, include/uapi/asm-generic/unistd.h).
_REFUSED = {
  # Memory outside of the address space, much of it the kernel's own.
  'shmget': (29, 194),
  'semget': (64, 190),
  'msgget': (68, 186),
  'mq_open': (240, 180),
  'io_setup': (206, 0),
  'landlock_create_ruleset': (444, 444),
  'memfd_create': (319, 279),
  'memfd_secret': (447, 447),
  # Other processes.
  'ptrace': (101, 117),
  'process_vm_readv': (310, 270),
  'process_vm_writev': (311, 271),
  'pidfd_getfd': (438, 438),
  # Namespaces and mounts.
  'unshare': (272, 97),
  'setns': (308, 268),
  'mount': (165, 40),
  'umount2': (166, 39),
  'pivot_root': (155, 41),
  'open_tree': (428, 428),
  'move_mount': (429, 429),
  'fsopen': (430, 430),
  # Other parts of the kernel.
  'add_key': (248, 217),
  'request_key': (249, 218),
  'keyctl': (250, 219),
  'perf_event_open': (298, 241),
  'bpf': (321, 280),
  'userfaultfd': (323, 282),
  'io_uring_setup': (425, 425),
}
# They make sockets; the first argument is the family.
_SOCKETS = {'socket': (41, 198), 'socketpair': (53, 199)}
_LOCAL = 1  # AF_UNIX, which pipes of asyncio need. Others, such as AF_VSOCK, may reach beyond the network namespace.
# Machine -> column in the tables, and the kernel's name of the architecture.
_MACHINES = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # refused: EPERM
_X32 = 0x40000000  # numbers of a second set of calls on x86-64


def call_filter() -> bytes:
  """The filter as a program of the kernel (classic BPF); empty on machines whose numbers are not known here."""
  if platform.machine() not in _MACHINES:
    return b''
  column, architecture = _MACHINES[platform.machine()]
  numbers = [row[column] for row in _REFUSED.values()]
  socket, pair = (row[column] for row in _SOCKETS.values())
  # An operation, how many to skip if it holds and if not, and its number.
  operations = [
    (_LOAD, 0, 0, 4),
    (_IF_EQUAL, 1, 0, architecture),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, 0),
    (_IF_AT_LEAST, len(numbers) + 6, 0, _X32),
    *((_IF_EQUAL, len(numbers) + 5 - i, 0, number) for i, number in enumerate(numbers)),
    (_IF_EQUAL, 2, 0, socket),
    (_IF_EQUAL, 1, 0, pair),
    (_RETURN, 0, 0, _ALLOW),
    (_LOAD, 0, 0, 16),  # the lower half of the first argument, of which the kernel reads no more
    (_IF_EQUAL, 0, 1, _LOCAL),
    (_RETURN, 0, 0, _ALLOW),
    (_RETURN, 0, 0, _REFUSE),
  ]
  return b''.join(struct.pack('=HBBI', *operation) for operation in operations)
