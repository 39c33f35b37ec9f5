"""An S3 server on this machine (moto's), and a line to it that can be slow, be torn or end at a full bucket."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.request import Request, urlopen

BUCKET = "bucket"
FULL = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(body := b"<Error><Code>QuotaExceeded</Code><Message>The bucket is full</Message></Error>"), body)
)


class Line:
    """A TCP proxy before the server. Its attributes may be changed while it runs."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.is_full = False
        """Every PUT is answered as by a full bucket."""
        self.bytes_per_s = 0.0
        """Speed of each connection towards the server; 0: unlimited."""
        self.torn = 0
        """Connections that are to be cut in the middle of a PUT."""
        self.secrets: list[str] = []
        """Both parts of the credentials."""
        self.puts: list[str] = []
        """Paths of the PUTs so far."""
        self._cuts = 0
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut the connections that there are; what is on its way is lost."""
        self._cuts += 1

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        cuts = self._cuts
        with suppress(OSError), client, server:
            while block := client.recv(1 << 16):
                if block.startswith(b"PUT "):
                    if self.is_full:
                        client.sendall(FULL)
                        return
                    self.puts.append(block.split(b" ", 2)[1].decode())
                    if self.torn:
                        self.torn -= 1
                        server.sendall(block[: len(block) // 2])
                        return
                if self.bytes_per_s:
                    time.sleep(len(block) / self.bytes_per_s)
                if cuts < self._cuts:
                    return
                server.sendall(block)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError), client, server:
            while block := server.recv(1 << 16):
                client.sendall(block)


@contextmanager
def s3_server() -> Iterator[Line]:
    """A server with an empty bucket, to which the environment leads, by way of a line."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else it prints every request
    import boto3  # late: every process that collects tests would import them
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    line = Line(server.get_host_and_port())
    settings = {
        "AWS_ACCESS_KEY_ID": "none-yet",
        "AWS_SECRET_ACCESS_KEY": "none-yet",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        users = boto3.client("iam")
        users.create_user(UserName="trainer")
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
        users.put_user_policy(UserName="trainer", PolicyName="store", PolicyDocument=json.dumps(policy))
        key = users.create_access_key(UserName="trainer")["AccessKey"]
        line.secrets = [key["AccessKeyId"], key["SecretAccessKey"]]
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = line.secrets
        ask_for_credentials = Request(
            f"{settings['AWS_ENDPOINT_URL']}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}, method="POST"
        )
        urlopen(ask_for_credentials).close()
        yield line
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        line.close()
        server.stop()
