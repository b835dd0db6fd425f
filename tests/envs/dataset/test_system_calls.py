"""The filter of system calls, run by a second implementation of the kernel's machine."""

import pathlib
import platform
import re
import struct

import pytest

from ragen_jax.envs.dataset.system_calls import call_filter

ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000
ARCHITECTURES = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
HEADERS = {'x86_64': '/usr/include/x86_64-linux-gnu/asm/unistd_64.h', 'aarch64': '/usr/include/asm-generic/unistd.h'}
NAMES = """shmget semget msgget mq_open io_setup landlock_create_ruleset memfd_create memfd_secret ptrace
process_vm_readv process_vm_writev pidfd_getfd unshare setns mount umount2 pivot_root open_tree move_mount fsopen
add_key request_key keyctl perf_event_open bpf userfaultfd io_uring_setup"""
UNIX = 1  # the family of local sockets


def decide(rules: bytes, number: int, architecture: int, first: int = UNIX) -> int:
  """What the kernel does with a call; its data are the number, the architecture, an address and the arguments."""
  data = struct.pack('=IIQ6Q', number, architecture, 7, first, *range(100, 105))
  program = list(struct.iter_unpack('=HBBI', rules))
  at = value = 0
  while True:
    code, yes, no, k = program[at]
    at += 1
    if code == 0x20:
      (value,) = struct.unpack_from('=I', data, k)
    elif code == 0x15:
      at += yes if value == k else no
    elif code == 0x35:
      at += yes if value >= k else no
    else:
      assert code == 0x06
      return k


@pytest.mark.parametrize('machine', ['x86_64', 'aarch64'])
def test_the_filter_refuses_what_the_kernel_s_header_numbers(monkeypatch, machine):
  header = pathlib.Path(HEADERS[machine])
  if not header.is_file():
    pytest.skip(f'needs the header {header}')
  monkeypatch.setattr(platform, 'machine', lambda: machine)
  rules, architecture = call_filter(), ARCHITECTURES[machine]
  found = re.findall(r'#define __NR(?:3264)?_(\w+)\s+(\d+)', header.read_text())
  numbers = {name: int(number) for name, number in found}
  assert set(NAMES.split()) <= set(numbers)
  refused = {n for n in range(1000) if decide(rules, n, architecture) == REFUSE}
  assert refused == {numbers[name] for name in NAMES.split()}
  assert {decide(rules, n, architecture) for n in range(1000) if n not in refused} == {ALLOW}
  for family in (0, 2, 10, 16, 17, 38, 40, 1 << 31, UNIX + 2):  # INET, INET6, NETLINK, PACKET, ALG, VSOCK among them
    refused_now = {n for n in range(1000) if decide(rules, n, architecture, family) == REFUSE}
    assert refused_now == refused | {numbers['socket'], numbers['socketpair']}
  assert decide(rules, numbers['socket'], architecture, (5 << 32) + 40) == REFUSE  # a family has 32 bits
  assert {decide(rules, n, 0x40000003) for n in range(1000)} == {KILL}  # calls of 32-bit programs
  assert decide(rules, 0x40000000 | numbers['shmget'], architecture) == REFUSE
  assert decide(rules, 0x40000000, architecture) == REFUSE


def test_other_machines_have_no_filter(monkeypatch):
  monkeypatch.setattr(platform, 'machine', lambda: 'riscv64')
  assert call_filter() == b''
