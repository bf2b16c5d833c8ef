"""Serve an object store on loopback: as much of Google Cloud Storage's API as gcsfs, its client and TensorStore use.

Objects live in memory. A test may look at them, and make requests fail.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PAGE = 100  # objects a listing gives at once: small, so that runs have several pages


@dataclasses.dataclass(frozen=True)
class Stored:
    """Holds an object of a bucket."""

    content: bytes
    generation: int
    updated: str


class ObjectStore:
    """Serves buckets: {bucket: {name: object}}."""

    def __init__(self, *buckets: str):
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        # (method, bucket, object or None) -> the HTTP status to fail with, or None
        self.failing: Callable[[str, str, str | None], int | None] = lambda method, bucket, name: None
        self.lock = threading.Lock()
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        self._generations = itertools.count(1)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.store = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put(self, bucket: str, name: str, content: bytes) -> Stored:
        """Store an object; the lock must be held by the caller where others write."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        made = Stored(content, next(self._generations), now)
        self.buckets[bucket][name] = made
        return made

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the names of a bucket's objects under a prefix."""
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def read(self, bucket: str, name: str) -> bytes:
        """Return an object's content."""
        return self.buckets[bucket][name].content


@contextlib.contextmanager
def serving(*buckets: str) -> Iterator[ObjectStore]:
    """Serve a store that every client of this process, and of those that it starts, talks to."""
    made = ObjectStore(*buckets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", made.url)  # gcsfs, google-cloud-storage
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", made.url)
        patch.setenv("GCE_METADATA_ROOT", made.url.removeprefix("http://"))
        patch.setenv("NO_GCE_CHECK", "true")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        yield made
    made.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    store: ObjectStore

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that gcsfs asks two questions at once and hangs up on the slower answer; report any other error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    server: _Server

    @property
    def store(self) -> ObjectStore:
        return self.server.store

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        body = self._body()
        with self.store.lock:
            self._decide(method, body)
        self._answer()

    def _decide(self, method: str, body: bytes) -> None:
        """Do what is asked for and set the answer."""
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        path = re.sub(r"^(/upload|/download)?/storage/v1", r"\1", parts.path)
        found = re.fullmatch(r"(/upload|/download)?/b/([^/]+)(?:/o(?:/(.+?))?)?", path)
        copied = re.fullmatch(r"/b/([^/]+)/o/(.+?)/(copyTo|rewriteTo)/b/([^/]+)/o/(.+)", path)
        if copied:
            source, what, _, target, other = (unquote(part) for part in copied.groups())
            self._copy(source, what, target, other)
            return
        if found is None:
            self._fail(404, f"no such method: {method} {self.path}")
            return
        bucket, name = found[2], unquote(found[3]) if found[3] else None
        status = self.store.failing(method, bucket, name or query.get("name"))
        if status is not None:
            self._fail(status, f"{method} {bucket}/{name or ''} is denied")
        elif bucket not in self.store.buckets:
            self._fail(404, "The specified bucket does not exist.")
        elif found[1] == "/upload":
            self._upload(method, bucket, query, body)
        elif name is None and path.rstrip("/").endswith("/o"):
            self._list(bucket, query)
        elif name is None:
            self._json({"kind": "storage#bucket", "id": bucket, "name": bucket})
        elif method == "DELETE":
            self._delete(bucket, name, query)
        else:
            self._get(bucket, name, query, media=query.get("alt") == "media")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            content = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    # ------------------------------------------------------------------------------------------------------- requests

    def _upload(self, method: str, bucket: str, query: dict[str, str], body: bytes) -> None:
        kind = query.get("uploadType")
        if "upload_id" in query:
            name, so_far = self.store.uploads[query["upload_id"]]
            so_far += body
            size = re.search(r"/(\d+)$", self.headers.get("Content-Range", ""))
            if size is None or int(size[1]) > len(so_far):
                self._send(308, b"", Range=f"bytes=0-{len(so_far) - 1}")
                return
            self._stored(bucket, name, query, bytes(so_far))
        elif kind == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            number = f"{len(self.store.uploads)}"
            self.store.uploads[number] = name, bytearray()
            self._send(200, b"", Location=f"{self.store.url}{self.path}&upload_id={number}")
        elif kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)"?', self.headers["Content-Type"])
            assert boundary is not None
            described, content = (
                part.partition(b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n")[2]
                for part in body.split(b"--" + boundary[1].encode())[1:3]
            )
            # Of the line break that ends a part, one alone is not content.
            ending = 2 if content.endswith(b"\r\n") else 1
            self._stored(bucket, json.loads(described)["name"], query, content[:-ending])
        else:
            self._stored(bucket, query["name"], query, body)

    def _stored(self, bucket: str, name: str, query: dict[str, str], content: bytes) -> None:
        if self._matches(bucket, name, query):
            self._json(self._resource(bucket, name, self.store.put(bucket, name, content)))

    def _get(self, bucket: str, name: str, query: dict[str, str], *, media: bool) -> None:
        found = self.store.buckets[bucket].get(name)
        if found is None:
            self._fail(404, f"No such object: {bucket}/{name}")
            return
        if query.get("ifGenerationNotMatch") == str(found.generation):
            self._send(304, b"")
            return
        if not self._matches(bucket, name, query):
            return
        if not media:
            self._json(self._resource(bucket, name, found))
            return
        about = {
            "Content-Type": "application/octet-stream",
            "x-goog-generation": str(found.generation),
            "x-goog-hash": f"md5={_md5(found.content)}",
            "x-goog-stored-content-length": str(len(found.content)),
            "Accept-Ranges": "bytes",
        }
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            self._send(200, found.content, **about)
            return
        size = len(found.content)
        start = int(span[1]) if span[1] else max(size - int(span[2]), 0)
        end = min(int(span[2]) + 1, size) if span[1] and span[2] else size
        if start >= size:
            self._fail(416, "Requested range not satisfiable")
        else:
            self._send(206, found.content[start:end], **about, **{"Content-Range": f"bytes {start}-{end - 1}/{size}"})

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start = max(query.get("startOffset", ""), query.get("pageToken", ""))
        end = query.get("endOffset", "")
        items: list[dict[str, Any]] = []
        prefixes, following = dict[str, None](), None
        most = min(int(query.get("maxResults", PAGE)), PAGE)
        for name in sorted(self.store.buckets[bucket]):
            if not name.startswith(prefix) or name < start or (end and name >= end):
                continue
            below, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            folder = f"{prefix}{below}{delimiter}" if found else None
            if folder in prefixes:
                continue
            if len(items) + len(prefixes) == most:
                following = name
                break
            if folder is not None:
                prefixes[folder] = None
            else:
                items.append(self._resource(bucket, name, self.store.buckets[bucket][name]))
        page = {"kind": "storage#objects", "items": items, "prefixes": list(prefixes), "nextPageToken": following}
        self._json({name: value for name, value in page.items() if value})

    def _delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        if name not in self.store.buckets[bucket]:
            self._fail(404, f"No such object: {bucket}/{name}")
        elif self._matches(bucket, name, query):
            del self.store.buckets[bucket][name]
            self._send(204, b"")

    def _copy(self, source: str, name: str, target: str, other: str) -> None:
        found = self.store.buckets[source].get(name)
        if found is None:
            self._fail(404, f"No such object: {source}/{name}")
            return
        made = self._resource(target, other, self.store.put(target, other, found.content))
        self._json({"kind": "storage#rewriteResponse", "done": True, "resource": made})

    def _matches(self, bucket: str, name: str, query: dict[str, str]) -> bool:
        """Return whether the object is of the generation that was asked for; answer the request if it is not."""
        wanted, found = query.get("ifGenerationMatch"), self.store.buckets[bucket].get(name)
        if wanted is None or int(wanted) == (found.generation if found else 0):
            return True
        self._fail(412, "At least one of the pre-conditions you specified did not hold.")
        return False

    # -------------------------------------------------------------------------------------------------------- answers

    def _resource(self, bucket: str, name: str, stored: Stored) -> dict[str, Any]:
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(stored.content)),
            "generation": str(stored.generation),
            "metageneration": "1",
            "updated": stored.updated,
            "timeCreated": stored.updated,
            "md5Hash": _md5(stored.content),
            "storageClass": "STANDARD",
        }

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _fail(self, status: int, message: str) -> None:
        content = json.dumps({"error": {"code": status, "message": message, "errors": [{"message": message}]}})
        self._send(status, content.encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.answer = status, content, headers

    def _answer(self) -> None:
        status, content, headers = self.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _md5(content: bytes) -> str:
    return base64.b64encode(hashlib.md5(content).digest()).decode()
