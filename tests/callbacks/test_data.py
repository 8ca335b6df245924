"""Each rank's share of a loader, on real ranks and inside a Trial."""

import itertools
import logging.handlers
import warnings

import pytest
import torch
import torchbearer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchbearer import Trial
from torchbearer.callbacks import Callback, on_checkpoint

from tests.ranks import ranks
from torchbearer_ddp.callbacks.data import ShardData, shard
from torchbearer_ddp.data.sampling import interleave
from torchbearer_ddp.errors import DistributedError
from torchbearer_ddp.group import collectives


def numbers(count):
    return TensorDataset(torch.arange(count), torch.zeros(count))


class Seen(Callback):
    """Notes which samples a rank takes, by epoch or pass."""

    def __init__(self):
        super().__init__()
        self.trained, self.evaluated, self.steps = [], [], []

    def on_start_training(self, state):
        self.trained.append([])
        self.steps.append(state[torchbearer.STEPS])

    def on_sample(self, state):
        self.trained[-1].append(state[torchbearer.X].tolist())

    def on_start_validation(self, state):
        self.evaluated.append([])
        self.steps.append(state[torchbearer.STEPS])

    def on_sample_validation(self, state):
        self.evaluated[-1].append(state[torchbearer.X].tolist())


class Echo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x.float() + self.weight


def make_trial(seen, callbacks=(), **options):
    model = Echo()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    callbacks = [seen, ShardData(**options), *callbacks]
    return Trial(model, optimizer, torch.nn.MSELoss(), callbacks=callbacks, verbose=0)


def everyone(value):
    return collectives.all_gather(value, "what the ranks saw")


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@ranks(2)
def test_training_shares_have_equally_many_batches_and_a_new_order_each_epoch():
    torch.manual_seed(collectives.rank())
    seen = Seen()
    loader = DataLoader(numbers(21), batch_size=4, shuffle=True)
    make_trial(seen).with_train_generator(loader).run(3)
    orders = []
    for epoch in range(3):
        shares = everyone(flat(seen.trained[epoch]))
        assert [len(share) for share in shares] == [11, 10]
        order = interleave(shares)
        assert sorted(order) == list(range(21))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert seen.steps == [3, 3, 3]
    assert len(loader) == 6  # the user's own loader is as it was


@ranks(2)
def test_the_global_batch_is_the_one_of_a_single_process():
    seen = Seen()
    loader = DataLoader(numbers(24), batch_size=8)
    make_trial(seen, global_batch=True).with_train_generator(loader).run(1)
    for step, batches in enumerate(zip(*everyone(seen.trained[0]), strict=True)):
        assert sorted(flat(batches)) == list(range(8 * step, 8 * step + 8))


class Evaluating(Callback):
    """Evaluates in one hook of a run."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self._evaluate)
        self._inside = False

    def _evaluate(self, state):
        if not self._inside:
            self._inside = True
            state[torchbearer.SELF].evaluate()
            self._inside = False


@ranks(2)
def test_an_evaluation_inside_a_run_leaves_the_order_of_its_data():
    def order(*callbacks):
        torch.manual_seed(3)
        seen = Seen()
        trial = make_trial(seen, callbacks=callbacks)
        # The share has two batches: it starts over within an epoch.
        trial.with_train_generator(DataLoader(numbers(8), 2, shuffle=True), steps=5)
        trial.with_val_generator(DataLoader(numbers(4), 2)).run(3)
        return seen.trained

    expected = order()
    assert expected[0] != expected[1]
    for hook in ("on_start", "on_start_epoch", "on_start_training", "on_step_training"):
        assert order(Evaluating(hook)) == expected, hook


@ranks(3)
def test_evaluation_takes_the_batches_of_a_single_process_and_a_rank_may_be_empty():
    seen = Seen()
    loader = DataLoader(numbers(7), batch_size=4)
    trial = make_trial(seen).with_generators(val_generator=loader, test_generator=loader)
    trial.evaluate()
    trial.predict()
    trial.evaluate()
    for taken in everyone(seen.evaluated):
        assert len(taken) == 3
        assert taken[0] == taken[1] == taken[2]
    mine = [[[0, 1, 2, 3]], [[4, 5, 6]], []][collectives.rank()]
    assert seen.evaluated[0] == mine


@ranks(2)
def test_validation_inside_a_run_and_evaluation_of_the_training_data_have_no_duplicates():
    seen = Seen()
    trial = make_trial(seen)
    trial.with_generators(DataLoader(numbers(9), batch_size=2), DataLoader(numbers(5)))
    trial.run(1)
    assert sorted(flat(flat(everyone(seen.evaluated[0])))) == list(range(5))
    trial.evaluate(data_key=torchbearer.TRAIN_DATA)
    assert sorted(flat(flat(everyone(seen.evaluated[1])))) == list(range(9))
    trial.run(2)
    assert sorted(set(flat(flat(everyone(seen.trained[1]))))) == list(range(9))


@ranks(2)
def test_steps_of_the_user_are_kept():
    seen = Seen()
    trial = make_trial(seen)
    trial.with_train_generator(DataLoader(numbers(8), batch_size=2), steps=3)
    trial.with_val_generator(DataLoader(numbers(20), batch_size=2), steps=2)
    trial.run(1)
    assert seen.steps == [3, 1]
    assert len(flat(seen.trained[0])) == 6  # the share has two batches and starts over
    assert sorted(flat(flat(everyone(seen.evaluated[0])))) == list(range(4))
    expected = list(range(20))
    # In evaluation they are the batches of all ranks, also if asked for again, and beyond the end.
    for number, steps in enumerate((7, 7, 5, 1, 10, 13), start=1):
        trial.for_val_steps(steps)
        trial.evaluate()
        taken = sorted(flat(flat(everyone(seen.evaluated[2 * number - 1]))))
        assert taken == sorted((expected + expected)[: 2 * steps])
        trial.evaluate()
        assert sorted(flat(flat(everyone(seen.evaluated[2 * number])))) == taken
    trial.evaluate(data_key=torchbearer.TRAIN_DATA)
    assert sorted(flat(flat(everyone(seen.evaluated[-1])))) == list(range(6))


def collate(samples):
    return torch.utils.data.default_collate(samples)


def init_worker(worker):
    del worker


@ranks(2)
def test_every_argument_of_the_loader_is_kept():
    generator = torch.Generator().manual_seed(4)
    arguments = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": collate,
        "drop_last": True,
        "timeout": 9.0,
        "worker_init_fn": init_worker,
        "multiprocessing_context": "fork",
        "generator": generator,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": False,
    }
    loader = DataLoader(numbers(20), shuffle=True, **arguments)
    loader.my_own = "attribute"
    for training in (True, False):
        shared = shard(loader, training=training)
        for name, value in arguments.items():
            found = getattr(shared, name)
            if name == "multiprocessing_context":
                found = found.get_start_method()
            assert found == value, name
        assert shared.dataset is loader.dataset
        assert shared.my_own == "attribute"
    batches = [x.tolist() for x, _ in shard(loader)]
    assert [len(batch) for batch in batches] == [3, 3, 3]
    order = interleave(everyone(flat(batches)))
    assert len(set(order)) == 18


@ranks(2)
def test_the_generator_of_the_user_decides_the_order():
    def order(seed):
        torch.manual_seed(collectives.rank())
        generator = torch.Generator().manual_seed(seed)
        return flat(
            x.tolist() for x, _ in shard(DataLoader(numbers(50), 5, True, generator=generator))
        )

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert not set(everyone(order(1))[0]) & set(everyone(order(1))[1])


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(10)),
    "random": lambda: RandomSampler(range(10), num_samples=10),
    "list": lambda: [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
}


@pytest.mark.parametrize("kind", SAMPLERS)
@ranks(2)
def test_samplers_are_sharded(kind):
    torch.manual_seed(collectives.rank())
    loader = DataLoader(numbers(10), batch_size=2, sampler=SAMPLERS[kind]())
    shares = everyone(flat(x.tolist() for x, _ in shard(loader)))
    assert sorted(flat(shares)) == list(range(10))
    if kind == "list":
        assert interleave(shares) == SAMPLERS[kind]()


@ranks(2)
def test_a_weighted_sampler_draws_one_order_for_all():
    torch.manual_seed(collectives.rank())
    weights = torch.tensor([0.0, 1.0, 0.0, 1.0])
    loader = DataLoader(numbers(4), sampler=WeightedRandomSampler(weights, 9))
    shares = everyone(flat(x.tolist() for x, _ in shard(loader)))
    assert [len(share) for share in shares] == [5, 5]
    assert set(flat(shares)) <= {1, 3}


@ranks(2)
def test_a_batch_sampler_is_sharded_batch_by_batch():
    batches = BatchSampler(SequentialSampler(range(10)), 2, drop_last=False)
    loader = DataLoader(numbers(10), batch_sampler=batches)
    trained = [x.tolist() for x, _ in shard(loader)]
    assert trained == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]][collectives.rank()]
    evaluated = [x.tolist() for x, _ in shard(loader, training=False)]
    assert evaluated == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]][collectives.rank()]


@ranks(2)
def test_a_loader_without_batches_is_sharded():
    loader = DataLoader(torch.arange(5), batch_size=None)
    assert [x.item() for x in shard(loader, training=False)] == [[0, 2, 4], [1, 3]][
        collectives.rank()
    ]


class Pairs(IterableDataset):
    def __init__(self, count):
        self.stream = Stream(count)

    def __iter__(self):
        return ((torch.tensor(n), torch.tensor(0.0)) for n in self.stream)

    def __len__(self):
        return len(self.stream)


class Stream(IterableDataset):
    """Does not know of ranks; splits itself between the workers of a loader, as torch advises."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.count, step))

    def __len__(self):
        return self.count


@ranks(2)
def test_an_iterable_data_set_is_sharded_item_by_item():
    rank = collectives.rank()
    loader = DataLoader(Stream(7), batch_size=2)
    trained = flat(x.tolist() for x in shard(loader))
    assert trained == [[0, 2, 4, 6], [1, 3, 5]][rank]
    assert len(shard(loader)) == 2
    dropped = flat(x.tolist() for x in shard(DataLoader(Stream(7), drop_last=True)))
    assert dropped == [[0, 2, 4], [1, 3, 5]][rank]
    evaluated = [x.tolist() for x in shard(loader, training=False)]
    assert evaluated == [[[0, 1], [4, 5]], [[2, 3], [6]]][rank]


@pytest.mark.parametrize("count", [16, 4])
@ranks(2, timeout=180)  # the first worker of a process takes long to start on a busy machine
def test_an_iterable_data_set_with_workers_loses_and_repeats_nothing(count):
    loader = DataLoader(Stream(count), batch_size=2, num_workers=2)
    single = [x.tolist() for x in loader]
    for training in (True, False):
        mine = shard(loader, training=training)
        shares = everyone([x.tolist() for x in mine])
        assert [len(share) for share in shares] == [len(mine)] * 2
        assert interleave(shares) == single


@ranks(2, timeout=180)
def test_the_workers_of_a_stream_have_as_many_batches_as_its_length_says():
    loader = DataLoader(Pairs(4), batch_size=2, num_workers=2)
    # Divided in the workers, one rank had no batch at all.
    make_trial(Seen()).with_generators(loader, loader).run(1)


class Zipped:
    """Two loaders in step, as in a program for domain adaptation."""

    def __init__(self, one, other):
        self.loaders = one, other

    def __iter__(self):
        for (x, y), (z, _) in zip(*self.loaders, strict=True):
            yield torch.cat([x, z]), torch.cat([y, y])

    def __len__(self):
        return len(self.loaders[0])


@ranks(2)
def test_a_loader_of_the_users_own_is_divided_batch_by_batch():
    torch.manual_seed(collectives.rank())
    shown = logging.handlers.BufferingHandler(99)
    logging.getLogger("torchbearer_ddp").addHandler(shown)
    loaders = [DataLoader(numbers(12), batch_size=2, shuffle=True) for _ in range(2)]
    seen = Seen()
    trial = make_trial(seen).with_train_generator(Zipped(*loaders))
    ready = [(torch.arange(n, n + 2), torch.zeros(2)) for n in range(0, 10, 2)]
    trial.with_val_generator(ready).run(2)
    assert [len(batches) for batches in seen.trained] == [3, 3]
    for epoch in range(2):
        batches = interleave(everyone(seen.trained[epoch]))
        assert sorted(flat(batches)) == sorted([*range(12), *range(12)])
    assert everyone(seen.trained[0]) != everyone(seen.trained[1])
    assert sorted(flat(flat(everyone(seen.evaluated[0])))) == list(range(10))
    trial.with_test_generator(ready)
    lines = [r.getMessage() for r in shown.buffer if "not a DataLoader" in r.getMessage()]
    if collectives.is_rank_zero():
        assert ["Zipped" in lines[0], "list" in lines[1], len(lines)] == [True, True, 2]
        assert "one of every 2 batches, and makes all of them" in lines[0]
    else:
        assert lines == []


@ranks(2)
def test_data_that_is_given_as_tensors():
    seen = Seen()
    trial = make_trial(seen)
    x, y = torch.arange(8), torch.zeros(8)
    trial.with_train_data(x, y, batch_size=2, num_workers=0)
    trial.with_val_data(x, y, batch_size=2, num_workers=0)
    trial.with_test_data(x, batch_size=3, num_workers=0)
    trial.run(1)
    assert sorted(flat(flat(everyone(seen.trained[0])))) == list(range(8))
    assert sorted(flat(flat(everyone(seen.evaluated[0])))) == list(range(8))
    one_by_one = make_trial(Seen()).with_val_generator(numbers(5))
    one_by_one.evaluate()  # a data set is a sequence of batches, too


@ranks(2)
def test_loaders_that_are_already_sharded_only_get_the_epoch():
    class SelfMade(Stream):
        shards_itself = True
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    explicit = shard(DataLoader(numbers(12), shuffle=True))
    torchs = DataLoader(numbers(12), sampler=DistributedSampler(numbers(12)))
    own = DataLoader(SelfMade(2))
    trial = make_trial(Seen()).with_generators(explicit, torchs, own, val_steps=6)
    trial.state[torchbearer.HISTORY].extend({} for _ in range(4))
    trial.run(5)
    assert trial.state[torchbearer.TRAIN_DATA] == (explicit, 6)
    assert trial.state[torchbearer.VALIDATION_DATA] == (torchs, 6)
    assert trial.state[torchbearer.TEST_DATA] == (own, 2)
    assert explicit.sampler.epoch == torchs.sampler.epoch == own.dataset.epoch == 4


@ranks(2)
def test_each_part_can_be_switched_off():
    loader = DataLoader(numbers(4))
    trial = make_trial(Seen(), train=False, validation=False, test=False)
    trial.with_generators(loader, loader, loader).run(1)
    for key in (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA, torchbearer.TEST_DATA):
        assert trial.state[key] == (loader, 4)


class Picky(DataLoader):
    def __init__(self, where):
        self.path = where
        super().__init__(numbers(4))


class Tagged(DataLoader):
    def __init__(self, *args, tag="none", **kwargs):
        self.tag = tag
        super().__init__(*args, **kwargs)


class Overruling(DataLoader):
    def __init__(self, dataset, **kwargs):
        super().__init__(dataset, **{**kwargs, "collate_fn": lambda samples: samples})


@ranks(2)
def test_what_cannot_be_sharded_raises_on_every_rank():
    class Endless:
        def __iter__(self):
            return iter(range(4))

    cases = [
        (7, "int cannot be sharded: it cannot be iterated"),
        (Picky("here"), "Picky cannot be sharded"),
        (Overruling(numbers(4)), "it changes collate_fn"),
        (DataLoader(numbers(4), sampler=Endless()), "Endless.*has no length"),
    ]
    for loader, message in cases:
        with pytest.raises(ValueError, match=message):
            shard(loader)
    with pytest.raises(ValueError, match=r"between 2 ranks.*batch size 3.*multiple of 2"):
        make_trial(Seen(), global_batch=True).with_train_generator(DataLoader(numbers(9), 3)).run(1)
    one_bad = Picky("here") if collectives.rank() == 1 else DataLoader(numbers(4))
    with pytest.raises((ValueError, DistributedError), match="Picky cannot be sharded"):
        make_trial(Seen()).with_val_generator(one_bad).evaluate()
    assert collectives.all_gather(1, "the ranks are still in step") == [1, 1]


@ranks(2)
def test_a_subclass_keeps_its_class_and_arguments():
    shared = shard(Tagged(numbers(4), batch_size=2, tag="mine"))
    assert type(shared) is Tagged
    assert shared.tag == "mine"
    assert shared.batch_size == 2


@ranks(2)
def test_an_infinite_training_loader_continues_where_it_was():
    seen = Seen()
    loader = DataLoader(numbers(16), batch_size=2, shuffle=True)
    loader.inf = True
    trial = make_trial(seen).with_train_generator(loader, steps=2).with_inf_train_loader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial.run(2)
    assert sorted(flat(flat(flat(everyone(seen.trained))))) == list(range(16))


def test_without_a_group_loaders_are_untouched():
    loader = DataLoader(numbers(4))
    assert shard(loader) is loader
    trial = make_trial(Seen()).with_generators(loader, loader, loader)
    trial.run(1)
    trial.evaluate()
    trial.predict()
    for key in (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA, torchbearer.TEST_DATA):
        assert trial.state[key] == (loader, 4)


@ranks(2)
def test_a_loader_that_is_set_again_is_evaluated_as_a_whole():
    seen = Seen()
    trial = make_trial(seen)
    loader = DataLoader(numbers(40), batch_size=4)
    for _ in range(3):
        trial.with_val_generator(loader).evaluate()
        trial.evaluate()  # and where it is not set again
    for count in (24, 40):
        trial.with_test_generator(DataLoader(numbers(count), batch_size=4), steps=count // 4)
        trial.predict()
    sets = [
        sorted(itertools.chain(*itertools.chain(*rows)))
        for rows in zip(*everyone(seen.evaluated), strict=True)
    ]
    assert sets == [[*range(40)]] * 6 + [[*range(24)], [*range(40)]]


@ranks(2)
def test_a_loader_that_is_set_again_inside_of_a_run_is_read_as_a_whole():
    seen = Seen()

    @on_checkpoint
    def predict(state):
        other = state[torchbearer.SELF]
        other.with_test_generator(DataLoader(numbers(16), batch_size=2)).predict()
        other.with_val_generator(DataLoader(numbers(40), batch_size=4)).evaluate()
        other.train()

    trial = make_trial(seen, [predict])
    trial.with_train_generator(DataLoader(numbers(8), batch_size=2)).run(3)
    predict.on_checkpoint(trial.state)
    sets = [
        sorted(itertools.chain(*itertools.chain(*rows)))
        for rows in zip(*everyone(seen.evaluated), strict=True)
    ]
    assert sets.count([*range(16)]) == 4
    assert sets.count([*range(40)]) == len(sets) - 4


@ranks(2)
def test_a_number_of_steps_is_that_of_all_ranks_each_time():
    seen = Seen()
    trial = make_trial(seen).with_val_generator(DataLoader(numbers(40), batch_size=4), steps=6)
    trial.evaluate()
    trial.evaluate()
    trial.with_val_generator(
        DataLoader(numbers(40), batch_size=4)
    ).evaluate()  # 6, as torchbearer does
    trial.for_val_steps(10).evaluate()
    counts = [sum(map(len, rows)) for rows in zip(*everyone(seen.evaluated), strict=True)]
    assert counts == [6, 6, 6, 10]
