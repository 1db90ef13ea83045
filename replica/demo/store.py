"""The process that outlives every node: the rendezvous store, and the last one to clear up.

It serves a key-value store on a free port of the loopback interface and prints the port. Its
standard input is a pipe from the demo: when that ends, however the demo ended (SIGKILL too), it
kills what is left of the run, removes the arenas and ends.

    python -m replica.demo.store RUN_ID ARENAS_DIR
"""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import torch.distributed as dist

from replica.demo.trees import sweep


def main(run_id: str, arenas_dir: Path) -> None:
    """Serve until standard input ends, then clear up."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    # The store takes the descriptor over, and would listen on every interface if it made its own.
    store = dist.TCPStore(  # type: ignore[attr-defined]  # exported by torch, not declared
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    print(store.port, flush=True)
    sys.stdin.read()
    sweep(run_id)
    shutil.rmtree(arenas_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
