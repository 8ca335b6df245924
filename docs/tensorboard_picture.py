"""Takes the picture on the TensorBoard page: the example's run, as the real TensorBoard shows it.

    python docs/tensorboard_picture.py

It trains ``examples/mnist_ddp.py`` on two local processes, serves the logs with ``tensorboard`` on
loopback, and photographs the page with Debian's ``chromium`` (``apt-get install chromium``).
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "tensorboard.png"
TAGS = "epoch/(val_)?(acc|loss)$|speed|step_time|learning_rate"
PAGE = f"?darkMode=false#scalars&_smoothingWeight=0&tagFilter={quote(TAGS)}"
SECONDS = 300


def train(folder):
    example = [sys.executable, str(ROOT / "examples" / "mnist_ddp.py"), "--out", "runs/mnist"]
    command = [*example, "--nproc-per-node", "2", "--epochs", "8"]
    subprocess.run(command, check=True, timeout=SECONDS, cwd=folder)


def serve(folder):
    """Starts TensorBoard on a free port of loopback, and returns it with its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--load_fast", "false"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in server.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", line):
            return server, found.group()
    raise RuntimeError("tensorboard ended without an address. Is it installed?")


def photograph(address, picture, profile):
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
        "--disable-background-networking --disable-component-update --disable-sync "
        "--window-size=1420,960 --virtual-time-budget=60000"
    )
    subprocess.run(
        [
            "chromium",
            *flags.split(),
            f"--user-data-dir={profile}",
            f"--screenshot={picture}",
            address + PAGE,
        ],
        check=True,
        timeout=SECONDS,
    )


def main():
    PICTURE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        train(scratch)
        server, address = serve(scratch)
        try:
            photograph(address, PICTURE, Path(scratch) / "profile")
        finally:
            server.terminate()
            server.wait(SECONDS)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
