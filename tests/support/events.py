"""Reads TensorBoard's event files."""

from __future__ import annotations

import os
import pathlib
import struct

from tensorboardX.proto.event_pb2 import Event


def read_events(path: str | os.PathLike[str]) -> list[Event]:
  """The events of a file, or of all files of a directory in the order in which TensorBoard reads them.

  A record of a TFRecord file is: u64 length, u32 checksum of it, the data, u32 checksum of the data.
  """
  path, events = pathlib.Path(path), []
  for file in sorted(path.iterdir()) if path.is_dir() else [path]:
    data = file.read_bytes()
    while data:
      size = struct.unpack('<Q', data[:8])[0]
      events.append(Event.FromString(data[12 : 12 + size]))
      data = data[12 + size + 4 :]
  return events
