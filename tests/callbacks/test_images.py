"""Pictures of the images of all ranks: few of them, none on a rank, and passes that are left."""

import pytest
import torch
import torchbearer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import TensorBoardImages, imaging, on_step_training

from tests.callbacks import optional_packages
from tests.log_lines import LogLines
from torchbearer_ddp import RankZeroOnly, ShardData, SyncGradients, SyncModel, data_parallel
from torchbearer_ddp.group import collectives

TRAINED, GLOBAL_BATCH = 24, 8


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Grids(list):
    """Keeps each picture with its epoch."""

    def keep(self, image, index, state):
        self.append((state[torchbearer.EPOCH], image))


def trial_with(*callbacks, evaluated=TRAINED, ours=None):
    model = nn.Sequential(nn.Flatten(), nn.Linear(27, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ours = data_parallel() if ours is None else ours
    trial = Trial(model, optimizer, nn.functional.cross_entropy, [], [*ours, *callbacks], verbose=0)
    x = torch.rand(TRAINED, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.arange(TRAINED) % 2)
    trial.with_train_generator(DataLoader(data, GLOBAL_BATCH // collectives.world_size()))
    few = TensorDataset(*data[:evaluated])
    return trial.with_val_generator(DataLoader(few, 4))


def draw(make, epochs=3, **options):
    """The pictures of this rank, and the lines about images."""
    grids = Grids()
    with optional_packages.installed(), LogLines() as lines:
        trial_with(make(grids), **options).run(epochs)
    return list(grids), [line for line in lines if "images" in line]


def assert_same_pictures(found, expected):
    assert [epoch for epoch, _ in found] == [epoch for epoch, _ in expected]
    for (_, image), (_, other) in zip(found, expected, strict=True):
        assert torch.equal(image, other)


def compare(two_ranks, make, **options):
    """The pictures of one process and of rank zero are equal; returns them with the lines."""
    expected, said = draw(make, **options)
    (found, lines), (others, silent) = two_ranks.run(draw, (make,), options)
    assert_same_pictures(found, expected)
    assert lines == said
    assert (others, silent) == ([], [])
    return expected, said


def grid(number, **options):
    return lambda grids: imaging.MakeGrid(num_images=number, **options).with_handler(grids.keep)


def test_images_that_one_pass_lacks_are_waited_for_and_said_once(two_ranks):
    pictures, said = compare(two_ranks, lambda grids: grid(30)(grids).on_train(), epochs=6)
    # torchbearer keeps 24 images of the first epoch, and draws with 6 of the second.
    assert [epoch for epoch, _ in pictures] == [1, 3, 5]
    assert said == [
        "MakeGrid waits for 30 images and has 24 after this pass over the data, so it draws "
        "nothing yet; num_images=24 would do"
    ]


@pytest.mark.parametrize("evaluated", [3, 4, 5, 13])
def test_ranks_with_fewer_batches_or_none_do_not_matter(two_ranks, evaluated):
    pictures, said = compare(
        two_ranks, lambda grids: grid(evaluated)(grids).on_val(), evaluated=evaluated, epochs=2
    )
    assert [epoch for epoch, _ in pictures] == [0, 1]
    assert said == []


def test_a_cache_around_a_function_of_the_users(two_ranks):
    class Inverted(imaging.ImagingCallback):
        def on_batch(self, state):
            return 1 - state[torchbearer.X]

    def make(grids):
        return Inverted().cache(18).make_grid(nrow=6).on_train().with_handler(grids.keep)

    def without_grid(grids):
        return Inverted().cache(18).on_train().with_handler(grids.keep, index=[0, 17])

    with optional_packages.installed():
        pictures, _ = compare(two_ranks, make)
        assert pictures[0][1].shape == (3, 9, 18)
        pictures, _ = compare(two_ranks, without_grid)
        assert len(pictures) == 6


def first_image(grids):
    return imaging.FromState(torchbearer.X, lambda x: x[0]).on_train().with_handler(grids.keep)


def of_the_model(grids):
    model = imaging.ClassAppearanceModel(2, (3, 3, 3), steps=1, target=1)
    return model.on_train().with_handler(grids.keep)


def test_what_draws_every_batch_says_that_it_has_those_of_rank_zero(two_ranks):
    expected, said = draw(first_image, epochs=1)
    assert said == []
    (found, lines), (others, silent) = two_ranks.run(draw, (first_image, 1))
    assert_same_pictures(found, expected)
    assert (others, silent) == ([], [])
    assert lines == [
        "FromState draws from the batches of rank 0 alone; with cache(num_images) it draws the "
        "first images of all ranks"
    ]
    (found, lines), _ = two_ranks.run(draw, (of_the_model, 1))
    assert (len(found), lines) == (1, [])


def wrapped(grids):
    return RankZeroOnly(grid(18)(grids).on_val())


def by_factory(grids):
    return RankZeroOnly(lambda: grid(18)(grids).on_val())


@pytest.mark.parametrize("make", [wrapped, by_factory])
def test_in_rank_zero_only_it_says_how_many_it_got(two_ranks, make):
    (pictures, said), others = two_ranks.run(draw, (make, 1))
    assert (pictures, others) == ([], ([], []))
    assert [line.partition(", so")[0] for line in said] == [
        "MakeGrid waits for 18 images and has 12 after this pass over the data"
    ]


def unsharded():
    return [SyncModel(), ShardData(validation=False), SyncGradients()]


def on_whole_data(grids):
    return grid(18)(grids).on_val()


def draw_on_whole_data():
    return draw(on_whole_data, ours=unsharded())


def test_data_that_every_rank_loads_is_not_gathered(two_ranks):
    expected, _ = draw(on_whole_data)
    (found, _), (others, _) = two_ranks.run(draw_on_whole_data)
    assert_same_pictures(found, expected)
    assert others == []


def draw_after_a_failure():
    """A run that fails in mid-pass, and another Trial with the same callback."""
    grids, failing = Grids(), [True]

    @on_step_training
    def fail(state):
        if failing[0] and state[torchbearer.BATCH] == 1:
            raise KeyError("a bad batch")

    callback = grid(20)(grids).on_train()
    with optional_packages.installed():
        trial = trial_with(callback, fail)
        with pytest.raises(KeyError):
            trial.run(1)
        failing[0] = False
        trial.run(1)
        trial_with(callback).run(1)
    return list(grids)


def test_a_pass_that_was_left_leaves_no_images(two_ranks):
    expected, _ = draw(lambda grids: grid(20)(grids).on_train(), epochs=1)
    found, others = two_ranks.run(draw_after_a_failure)
    assert others == []
    assert_same_pictures(found, [expected[0], expected[0]])


def short_tensorboard(folder):
    with optional_packages.installed(), LogLines() as lines:
        trial_with(TensorBoardImages(folder, key=torchbearer.X, num_images=100)).run(1)
    return [line for line in lines if "images" in line]


def test_tensorboard_says_how_many_it_got(two_ranks, tmp_path):
    line = "TensorBoardImages waits for 100 images and has 24 after this pass over the data"
    alone = short_tensorboard(str(tmp_path / "alone"))
    first, second = two_ranks.run(short_tensorboard, (str(tmp_path / "together"),))
    assert alone == first
    assert [each.partition(", so")[0] for each in first] == [line]
    assert second == []
