"""An S3 server on the loopback, behind a proxy that can stall or cut every connection."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer


class Proxy:
    """Forwards TCP connections to a port; ``mode`` is ``pass``, ``stall`` (nothing moves) or ``cut``."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.mode = "pass"
        self.bytes_down = 0
        self.moved = threading.Condition()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: str) -> None:
        with self.moved:
            self.mode = mode
            self.moved.notify_all()
        if mode == "cut":
            for connection in self.open:
                connection.close()
            self.open.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            if self.mode == "cut":
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self.target))
            self.open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                with self.moved:
                    while self.mode == "stall":
                        self.moved.wait()
                    if down:
                        self.bytes_down += len(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            sink.close()

    def close(self) -> None:
        self.set("cut")
        self.listener.close()


class ObjectStore:
    """The server, a bucket in it, and the proxy."""

    bucket = "corpus"

    def __init__(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self.server.start()
        _, port = self.server.get_host_and_port()
        self.proxy = Proxy(port)
        self.url = f"http://127.0.0.1:{self.proxy.port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        self.client.create_bucket(Bucket=self.bucket)

    def upload(self, folder: Path, prefix: str) -> str:
        """Copy a folder into the bucket; its address."""
        for path in folder.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}"
                self.client.upload_file(str(path), self.bucket, key)
        return f"s3://{self.bucket}/{prefix}"

    def close(self) -> None:
        self.proxy.close()
        self.server.stop()
