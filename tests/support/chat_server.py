"""A server on this machine that speaks chat completions, as well or as badly as a test wants."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time


def good(text='Up', **message):
  """An answer of the usual form."""
  usage = message.pop('usage', {'completion_tokens': 3})
  message = {'role': 'assistant', 'content': text} | message
  return 200, {}, json.dumps({'choices': [{'index': 0, 'message': message}], 'usage': usage})


@contextlib.contextmanager
def server(answers):
  """A server on a free port.

  Args:
    answers: what each request gets, in the order in which they come; behind the last, a good answer. Each is (status,
      headers, body), the body whole or in parts that trickle in; or a number of seconds to wait before a good one; or
      None, to hang up; or a function from the request's body to one of these.

  Yields:
    (base address, list of the requests as (path, headers, body)), names of headers as in 'Content-Type'.
  """
  asked, lock, left = [], threading.Lock(), list(answers)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      with lock:
        asked.append((self.path, {name.title(): value for name, value in self.headers.items()}, body))
        answer = left.pop(0) if left else good()
      answer = answer(body) if callable(answer) else answer
      if answer is None:
        return
      if isinstance(answer, float):
        time.sleep(answer)
        answer = good()
      status, headers, text = answer
      with contextlib.suppress(OSError):  # the client may have left
        self.send_response(status)
        for name, value in headers.items():
          self.send_header(name, value)
        self.end_headers()
        for part in [text] if isinstance(text, str | bytes) else text:
          self.wfile.write(part.encode() if isinstance(part, str) else part)
          if part is not text:
            time.sleep(0.05)

    def log_message(self, *arguments):
      pass

  httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  thread = threading.Thread(target=httpd.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
  thread.start()
  try:
    yield f'http://127.0.0.1:{httpd.server_port}/v1', asked
  finally:
    httpd.shutdown()
    httpd.server_close()
