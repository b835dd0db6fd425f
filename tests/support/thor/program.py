"""A stand-in for AI2-THOR's program of Unity, for the real package, which speaks with it through two pipes.

A message is a list of parts, each a header (type and length) and a body, and an end. The first comes from the program.
"""

from __future__ import annotations

import json
import os
import struct
import sys

import msgpack

sys.path.insert(0, os.path.join(os.path.dirname(__file__), *['..'] * 3))

from tests.support.thor.house import SCENES, House

_HEADER = '!BI'
_METADATA, _ACTION, _IMAGE, _END = 1, 2, 4, 255


def main() -> None:
  size = int(sys.argv[sys.argv.index('-screen-width') + 1])
  house, number = House(size), 0
  with open(os.environ['AI2THOR_FIFO_SERVER_PIPE_PATH'], 'wb') as out:
    _send(out, house, 0, None)
    with open(os.environ['AI2THOR_FIFO_CLIENT_PIPE_PATH'], 'rb') as read:
      while True:
        message = _receive(read)
        number, action, told = message.pop('sequenceId'), message.pop('action'), None
        if action == 'GetScenesInBuild':
          told = [f'{scene}_physics' for scene in SCENES]
        elif action == 'Reset':
          house.reset(message['sceneName'])
        elif action == 'Initialize':
          house.fov = message['fieldOfView']
        elif action != 'ChangeResolution':
          house.act(action, **message)
        _send(out, house, number, told)


def _receive(read) -> dict:
  action = {}
  while True:
    kind, length = struct.unpack(_HEADER, read.read(struct.calcsize(_HEADER)))
    if kind == _END:
      return action
    assert kind == _ACTION
    action = json.loads(read.read(length))


def _send(out, house: House, number: int, told) -> None:
  frame = house.frame()
  agent = house.metadata() | {
    'screenWidth': frame.shape[1],
    'screenHeight': frame.shape[0],
    'agentId': 0,
    'thirdPartyCameras': [],
    'colors': None,
    'errorCode': '',
    'actionReturn': told,
    'sceneName': house.scene,
  }
  whole = {'agents': [agent], 'sequenceId': number, 'activeAgentId': 0, 'thirdPartyCameras': []}
  for kind, body in ((_METADATA, msgpack.packb(whole)), (_IMAGE, frame[::-1].tobytes()), (_END, b'')):
    out.write(struct.pack(_HEADER, kind, len(body)) + body)
  out.flush()


if __name__ == '__main__':
  main()
