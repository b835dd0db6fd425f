"""A stand-in for the Hugging Face Hub: repositories that uploads create, and the files of their commits."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

TOKEN = 'hf_standInStandInStandIn'


class Hub:
  """What was uploaded.

  Attributes:
    url: address of the hub.
    repositories: 'model' or 'dataset' and the name -> what its creation asked for.
    files: the same -> path -> content.
    messages: first lines of the commits.
    refuses: status of every answer, 0 for none.
  """

  def __init__(self, url: str):
    """An empty hub."""
    self.url, self.refuses = url, 0
    self.repositories: dict[tuple[str, str], dict[str, Any]] = {}
    self.files: dict[tuple[str, str], dict[str, bytes]] = {}
    self.messages: list[str] = []
    self.stored: dict[str, bytes] = {}  # by SHA-256

  def answer(self, method: str, path: str, body: bytes) -> dict[str, Any]:
    """The answer to a request; KeyError for one that the stand-in does not know."""
    parts = path.partition('?')[0].strip('/').split('/')
    if path == '/api/repos/create':
      asked = json.loads(body)
      kind, name = asked.get('type', 'model'), f'{asked.get("organization", "me")}/{asked["name"]}'
      self.repositories.setdefault((kind, name), asked)
      return {'url': f'{self.url}/{name}', 'id': name}
    if path == '/api/validate-yaml':
      return {'errors': [], 'warnings': []}
    if parts[0] == 'api' and method == 'GET':
      return {'name': 'me', 'id': '/'.join(parts[2:4]), 'sha': '0' * 40, 'siblings': []}
    if parts[-1] == 'batch':  # of large files, by Git LFS
      objects = json.loads(body)['objects']
      upload = {x['oid']: {'upload': {'href': f'{self.url}/store/{x["oid"]}'}} for x in objects}
      return {'transfer': 'basic', 'objects': [x | {'actions': upload[x['oid']]} for x in objects]}
    if parts[0] == 'store' and method == 'PUT':
      self.stored[parts[1]] = body
      return {}
    key = parts[1].removesuffix('s'), '/'.join(parts[2:4])
    if key not in self.repositories:
      raise KeyError(path)
    if parts[4] == 'preupload':
      files = json.loads(body)['files']
      modes = {x['path']: 'lfs' if 'safetensors' in x['path'] else 'regular' for x in files}
      return {'files': [x | {'uploadMode': modes[x['path']], 'shouldIgnore': False} for x in files]}
    if parts[4] == 'commit':
      for line in map(json.loads, body.splitlines()):
        value = line['value']
        if line['key'] == 'header':
          self.messages.append(value['summary'])
        elif line['key'] == 'lfsFile':
          self.files.setdefault(key, {})[value['path']] = self.stored[value['oid']]
        else:
          self.files.setdefault(key, {})[value['path']] = base64.b64decode(value['content'])
      return {'commitUrl': f'{self.url}/{key[1]}/commit/1', 'commitOid': '1' * 40, 'pullRequestUrl': None}
    raise KeyError(path)


@contextlib.contextmanager
def stand_in() -> Iterator[Hub]:
  """Context manager: a hub on this machine, which accepts `TOKEN` only."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def _reply(self):
      body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
      if self.headers.get('Transfer-Encoding') == 'chunked':
        body = b''
        while size := int(self.rfile.readline(), 16):
          body += self.rfile.read(size)
          self.rfile.readline()
        self.rfile.readline()
      status = hub.refuses or (200 if TOKEN in self.headers.get('Authorization', '') or 'store' in self.path else 401)
      try:
        answer = hub.answer(self.command, self.path, body) if status == 200 else {'error': 'refused'}
      except KeyError:
        status, answer = 404, {'error': f'{self.command} {self.path} is not known'}
      content = json.dumps(answer).encode()
      self.send_response(status)
      self.send_header('Content-Type', 'application/json')
      self.send_header('Content-Length', str(len(content)))
      self.end_headers()
      self.wfile.write(content)

    do_GET = do_POST = do_PUT = _reply

    def log_message(self, *_):
      """Nothing on the terminal."""

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  hub = Hub(f'http://127.0.0.1:{server.server_port}')
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield hub
  finally:
    server.shutdown()
    server.server_close()
    thread.join()
