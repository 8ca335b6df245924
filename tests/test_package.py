"""The names that `import torchbearer_ddp` provides, and what it imports."""

import subprocess
import sys

import pytest

import torchbearer_ddp


def test_every_name_of_the_package_is_there():
    assert all(hasattr(torchbearer_ddp, name) for name in torchbearer_ddp.__all__)


def test_a_name_that_is_not_there_is_named():
    with pytest.raises(AttributeError, match="'torchbearer_ddp' has no attribute 'Tensorboard'"):
        torchbearer_ddp.Tensorboard  # noqa: B018


def test_tensorboardx_and_submitit_are_imported_on_first_use():
    """Nor does what a rank runs besides need them."""
    program = (
        "import sys, torchbearer_ddp, torchbearer_ddp.launch.fork_server\n"
        "assert not {'tensorboardX', 'submitit'} & set(sys.modules)\n"
        "torchbearer_ddp.TensorBoard\n"
        "assert 'tensorboardX' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
