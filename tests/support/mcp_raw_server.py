"""A program that speaks MCP over stdin and stdout in its own words, and breaks the protocol where it is asked to.

It needs no package and starts at once. The first argument says how it begins; the argument `how` of a call, how it
answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

TEXT = {'type': 'string'}
TOOLS = [
  {
    'name': 'doIt',
    'description': 'Does one of many things.\n\nNot told.',
    'inputSchema': {'type': 'object', 'properties': {'how': TEXT, 'wait': {'type': 'number'}}, 'required': ['how']},
  },
  {'name': 'other-tool', 'inputSchema': {'type': 'object'}},
]
CONTENT = {
  'two': [{'type': 'text', 'text': 'first'}, {'type': 'text', 'text': 'second'}],
  'image': [{'type': 'image', 'data': '', 'mimeType': 'image/png'}, {'type': 'text', 'text': 'after'}],
  'resource': [{'type': 'resource', 'resource': {'uri': 'file:///a', 'text': 'of a file'}}],
  'nothing': [],
}


def send(**message) -> None:
  """Writes a message."""
  print(json.dumps({'jsonrpc': '2.0', **message}), flush=True)


def result_of(how: str) -> dict:
  """The result of a call."""
  if how == 'structured':
    return {'content': [], 'structuredContent': {'a': [1, 'é']}}
  if how == 'error':
    return {'content': [{'type': 'text', 'text': 'no such city'}], 'isError': True}
  if how == 'no result':
    return {'neither': 'this nor that'}
  if how == 'variables':
    return {'content': [{'type': 'text', 'text': json.dumps({k: v for k, v in os.environ.items() if 'RAGEN' in k})}]}
  if how == 'itself':
    return {'content': [{'type': 'text', 'text': f'{os.getpid()} {os.getppid()}'}]}
  return {'content': CONTENT.get(how, [{'type': 'text', 'text': how}])}


def call(number: int, arguments: dict) -> None:
  """Answers a call."""
  how = arguments['how']
  if how == 'die':
    print('I was told to die', file=sys.stderr, flush=True)
    sys.exit(3)
  elif how == 'die silently':
    os._exit(0)
  elif how == 'hang':
    return
  elif how == 'noise':
    print('this is no message', flush=True)
    send(id=number, result=result_of(how))
  elif how == 'endless':
    while True:
      print('x' * (1 << 20), end='')
  elif how.startswith('code '):
    send(id=number, error={'code': int(how.split()[1]), 'message': 'words of the server'})
  elif how.startswith('ask '):
    send(
      id='mine',
      method=how.split()[1],
      params={'messages': [], 'maxTokens': 5, 'message': '', 'requestedSchema': {'type': 'object', 'properties': {}}},
    )
    send(id=number, result=result_of(sys.stdin.readline().strip()))
  else:
    time.sleep(arguments.get('wait', 0))
    send(id=number, result=result_of(how))


def main(begin: str, *rest: str) -> None:
  """Serves until stdin ends."""
  if begin == 'mute':
    time.sleep(60)
  if begin == 'late':  # reads on when its stdin has ended
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    with open(rest[0], 'w', encoding='utf-8') as file:
      file.write(f'{os.getpid()} {child.pid}')
  for line in sys.stdin:
    message = json.loads(line)
    method, number, params = message['method'], message.get('id'), message.get('params') or {}
    if method == 'initialize':
      about = {'name': 'raw', 'version': '1'}
      send(id=number, result={'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}}, 'serverInfo': about})
    elif method == 'tools/list':
      page = int(params.get('cursor') or 0)
      more = {'nextCursor': str(page + 1)} if begin == 'endless' or page + 1 < len(TOOLS) else {}
      send(id=number, result={'tools': TOOLS[page % len(TOOLS) :][:1], **more})
    elif method == 'tools/call':
      call(number, params['arguments'])
    elif number is not None:
      send(id=number, error={'code': -32601, 'message': 'Method not found'})
  if begin == 'late':
    time.sleep(600)


if __name__ == '__main__':
  main(*sys.argv[1:] or [''])
