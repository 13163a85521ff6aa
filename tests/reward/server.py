"""A reward service for tests, of Python's standard library: `python3 server.py [KEY-AND-CERTIFICATE.pem]`.

Prints its port, and ends when its standard input does. The path of a request says how it behaves, as /hang; as /hang/x only
where a query has x in it, and as /hang/FILE only while there is such a file (an absolute path). Otherwise a response scores
its length and a half, or its `level` where the rows have that field.
"""

import json
import os
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body, length=None, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode, _, only = self.path[1:].partition("?")[0].partition("/")
        if mode == "turn":
            return self.do_turn(request)
        lengths = [len(q) - len(p) + 0.5 for q, p in zip(request["query"], request["prompts"])]
        rewards = request.get("level", lengths)
        is_bad = os.path.exists("/" + only.lstrip("/")) if "/" in only else any(only in q for q in request["query"])
        try:
            getattr(self, "do_" + mode if is_bad else "do_right")(request, rewards)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def do_turn(self, request):
        """An environment that counts: tests/reward/environment.rs has the same in Python."""
        turns = request["turns"]
        if turns[-1]["text"] == "bad":
            return self.answer(200, {"error": "no such tool"})
        if turns[-1]["text"] == "silent":
            return self.answer(200, {"feedback": None, "reward": 1.5, "done": None, "extra": None})
        if turns[-1]["text"] == "look":
            look = [{"role": "user", "content": [{"type": "image", "image": "rgb.png"}, {"type": "image"}]}]
            return self.answer(200, {"feedback": look, "images": ["tiny.png"], "done": False})
        done = len(turns) == 3
        feedback = f"<{len(turns)}:{turns[-1]['text']}:{request['row']['columns'].get('level')}>"
        self.answer(200, {"feedback": feedback, "reward": len(turns) / 2, "done": done, "extra": {"n": len(turns)}})

    def do_right(self, request, rewards):
        self.answer(200, {"rewards": rewards})

    def do_logs(self, request, rewards):
        logs = {"level": rewards, "nothing": [None] * len(rewards), "one": 1}
        self.answer(200, {"rewards": [[x] for x in rewards], "scores": rewards, "extra_logs": logs})

    def do_logprobs(self, request, rewards):
        self.answer(200, {"rewards": [sum(one) for one in request.get("logprobs", [])]})

    def do_echo(self, request, rewards):
        self.answer(400, {"keys": sorted(request), "level": request.get("level")})

    def do_500(self, request, rewards):
        self.answer(500, b"out of tea")

    def do_400(self, request, rewards):
        self.answer(422, b"\x1b[2Jno such\tfield")

    def do_redirect(self, request, rewards):
        self.answer(307, b"", Location="/right")

    def do_garbage(self, request, rewards):
        self.answer(200, b"<html>welcome</html>")

    def do_list(self, request, rewards):
        self.answer(200, rewards)

    def do_empty(self, request, rewards):
        self.answer(200, b"")

    def do_nothing(self, request, rewards):
        self.answer(200, {"reward": rewards})

    def do_more(self, request, rewards):
        self.answer(200, {"rewards": [*rewards, 1]})

    def do_nan(self, request, rewards):
        self.answer(200, {"rewards": [float("nan")] * len(rewards)})

    def do_huge(self, request, rewards):
        self.answer(200, {"rewards": [1e300] * len(rewards)})

    def do_text(self, request, rewards):
        self.answer(200, {"rewards": ["0.5"] * len(rewards)})

    def do_null(self, request, rewards):
        self.answer(200, {"rewards": [None] * len(rewards)})

    def do_hang(self, request, rewards):
        time.sleep(1000)

    def do_slow(self, request, rewards):
        self.answer(200, b"{", length=1000)
        while True:
            time.sleep(0.1)
            self.wfile.write(b" ")

    def do_flood(self, request, rewards):
        self.answer(200, b"[", length=1 << 30)
        for _ in range(1 << 10):
            self.wfile.write(b" " * (1 << 20))

    def do_cut(self, request, rewards):
        self.answer(200, b'{"rewards": [', length=1000)

    def do_close(self, request, rewards):
        self.close_connection = True

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


server = Server(("127.0.0.1", 0), Handler)
if len(sys.argv) > 1:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(sys.argv[1])
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
