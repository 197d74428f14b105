"""A tiny server of streamed completions as the app sends them, in this process."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN_FIELDS = frozenset(
    {"model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options"}
    | {"ignore_eos", "cache_salt"}
)
WORDS = ("a ", "b ", "c ")


def event(text: str | None, num_tokens: int, *, num_accepted: int = 0, num_drafted: int = 0) -> str:
    """An event with its usage; None is the last, which has no text."""
    speculation = {"accepted_tokens": num_accepted, "drafted_tokens": num_drafted}
    usage = {"completion_tokens": num_tokens, "speculation": speculation}
    choices = [] if text is None else [{"text": text}]
    return json.dumps({"choices": choices, "usage": usage})


class OpenAIServer(ThreadingHTTPServer):
    """Answers every request with WORDS, and keeps what it was asked."""

    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses_every: int | None = None
        """The number of requests of which the last gets status 429."""
        self.together: threading.Barrier | None = None
        """What requests wait at before they are answered."""
        self.endless_prompts: tuple[str, ...] = ()
        """Prompts that end so are answered until the client hangs up."""
        self.events: tuple[str, ...] | None = None
        """What is streamed instead."""
        self.breaks_off = 0
        """The number of coming requests that get no answer but the end of the connection."""
        self.status_of_unknown_fields = 400
        self.requests: list[dict[str, Any]] = []
        self.most_at_a_time = 0
        self._num_running = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def begin(self, request: dict[str, Any]) -> bool:
        """Whether it is to be answered."""
        with self._lock:
            self.requests.append(request)
            self._num_running += 1
            self.most_at_a_time = max(self.most_at_a_time, self._num_running)
            every = self.refuses_every
            return every is None or len(self.requests) % every != 0

    def must_break_off(self) -> bool:
        with self._lock:
            self.breaks_off = max(0, (left := self.breaks_off) - 1)
            return left > 0

    def end(self) -> None:
        with self._lock:
            self._num_running -= 1


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.must_break_off():
            self.close_connection = True
            return
        unknown = sorted(request.keys() - KNOWN_FIELDS)
        if unknown:
            message = f"there is no field {unknown[0]}"
            self._answer(self.server.status_of_unknown_fields, {"error": {"message": message}})
            return
        is_taken = self.server.begin(request)
        try:
            if not is_taken:
                self._answer(429, {"error": {"message": "too many"}})
                return
            if self.server.together is not None:
                self.server.together.wait(timeout=20)
            self._stream(str(request["prompt"]).endswith(self.server.endless_prompts or "\0"))
        finally:
            self.server.end()

    def _stream(self, is_endless: bool) -> None:
        self.send_response(200)
        self.end_headers()
        if self.server.events is not None:
            for data in self.server.events:
                self._send(data)
            return
        try:
            for num_tokens, word in enumerate(WORDS, start=1):
                self._send(event(word, num_tokens))
            while is_endless:
                self._send(event("on ", num_tokens := num_tokens + 1))
                threading.Event().wait(0.002)
        except (BrokenPipeError, ConnectionResetError):
            return
        self._send(event(None, len(WORDS)))
        self._send("[DONE]")

    def _send(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def _answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Not to the test's output."""


@contextmanager
def openai_server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
