"""Takes the pictures on the TensorBoard page: the example's run, as the real TensorBoard shows it.

    python docs/tensorboard_picture.py

It trains ``examples/mnist_ddp.py`` on two local processes, serves the logs with ``tensorboard`` on
loopback, and photographs the curves with Debian's ``chromium`` (``apt-get install chromium``), once
in light and once in dark colours.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402

#: For light and dark pages; letters have the size of the page around them.
PICTURES = {
    "false": ROOT / "docs" / "images" / "tensorboard.png",
    "true": ROOT / "docs" / "images" / "tensorboard-dark.png",
}
TAGS = "epoch/val_(acc|loss)$|speed|step_time"
PAGE = f"#scalars&_smoothingWeight=0&tagFilter={quote(TAGS)}"
#: The window, and the corner of the curves in it: left and above are settings.
SIZE, CORNER = (1010, 998), (280, 170)
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


def main():
    with tempfile.TemporaryDirectory() as scratch:
        train(scratch)
        server, address = serve(scratch)
        try:
            with Browser(Path(scratch) / "profile") as browser:
                browser.resize(*SIZE)
                for dark, picture in PICTURES.items():
                    browser.open("about:blank")
                    browser.open(f"{address}?darkMode={dark}{PAGE}")
                    time.sleep(10)  # the curves are fetched and drawn after the page has loaded
                    browser.photograph(picture, left=CORNER[0], top=CORNER[1], sharpness=2)
                    print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size // 1024} kB")
        finally:
            server.terminate()
            server.wait(SECONDS)


if __name__ == "__main__":
    main()
