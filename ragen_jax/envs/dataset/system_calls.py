"""The filter of system calls in the sandbox, for the kernel (seccomp).

It refuses calls that no graded program needs: those that give memory which no other limit counts, those that look into
other processes, and rarely used parts of the kernel, where most of its faults are found.
"""

from __future__ import annotations

import platform
import struct

# Name -> number on x86-64, and on 64-bit Arm (Linux: arch/x86/entry/syscalls, include/uapi/asm-generic/unistd.h).
_REFUSED = {
  # Memory outside of the address space.
  'shmget': (29, 194),
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
# Machine -> column in `_REFUSED`, and the kernel's name of the architecture.
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
  # An operation, how many to skip if it holds and if not, and its number.
  operations = [
    (_LOAD, 0, 0, 4),
    (_IF_EQUAL, 1, 0, architecture),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, 0),
    (_IF_AT_LEAST, len(numbers) + 1, 0, _X32),
    *((_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
    (_RETURN, 0, 0, _ALLOW),
    (_RETURN, 0, 0, _REFUSE),
  ]
  return b''.join(struct.pack('=HBBI', *operation) for operation in operations)
