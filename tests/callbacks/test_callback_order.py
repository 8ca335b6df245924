"""Hooks are called in our order, and the user's list keeps its positions."""

import pytest
import torchbearer
from torchbearer import Trial
from torchbearer.callbacks import Callback, on_step_training

from torchbearer_ddp.callbacks.callback_order import FIRST, LAST, OrderedCallback
from torchbearer_ddp.callbacks.hooks import HOOKS


class Noting(OrderedCallback):
    def __init__(self, name, notes, order):
        self.name, self.notes, self.order = name, notes, order

    def on_step_training(self, state):
        self.notes.append(self.name)


def test_first_and_last_win_over_the_place_in_the_list():
    notes = []
    plain = on_step_training(lambda state: notes.append("plain"))
    listed = [
        Noting("last", notes, {"on_step_training": LAST}),
        plain,
        Noting("later", notes, {"on_step_training": LAST + 1}),
        Noting("first", notes, {"on_step_training": FIRST}),
        Noting("in place", notes, {"on_backward": FIRST}),
    ]
    trial = Trial(None, callbacks=listed, verbose=0).for_steps(1)
    trial.run(1)
    assert notes == ["first", "plain", "in place", "last", "later"]
    assert list(trial.state[torchbearer.CALLBACK_LIST]) == listed
    assert len(trial.state_dict()[torchbearer.CALLBACK_LIST]["callback_states"]) == 5


def test_a_callback_that_is_appended_later_is_called_and_a_copy_keeps_the_order():
    notes = []
    trial = Trial(
        None, callbacks=[Noting("last", notes, {"on_step_training": LAST})], verbose=0
    ).for_steps(1)
    trial.run(1)
    trial.state[torchbearer.CALLBACK_LIST].append([on_step_training(lambda s: notes.append("new"))])
    copied = trial.state[torchbearer.CALLBACK_LIST].copy()
    notes.clear()
    trial.run(2)
    assert notes == ["new", "last"]
    assert [getattr(c, "name", "new") for c in copied.in_order("on_step_training")] == [
        "new",
        "last",
    ]


def test_every_hook_of_the_host_is_covered():
    called = []

    class All(OrderedCallback):
        pass

    for hook in HOOKS:
        if hook != "on_init":
            setattr(All, hook, lambda self, state, hook=hook: called.append(hook))
    ordered = Trial(None, callbacks=[All()], verbose=0).state[torchbearer.CALLBACK_LIST]
    for hook in HOOKS:
        getattr(ordered, hook)({torchbearer.CALLBACK_LIST: ordered})
    assert called == [hook for hook in HOOKS if hook != "on_init"]
    assert set(HOOKS) == {name for name in dir(Callback) if name.startswith("on_")}


@pytest.mark.parametrize("order", [3, "descending", {"on_step_training": -5}, None])
def test_an_attribute_order_of_a_users_callback_has_no_meaning_here(order):
    notes = []

    class Users(Callback):
        def on_step_training(self, state):
            notes.append("the user's")

    users = Users()
    users.order = order
    listed = [Noting("first", notes, {"on_step_training": FIRST}), users]
    Trial(None, callbacks=listed, verbose=0).for_steps(1).run(1)
    assert notes == ["first", "the user's"]
