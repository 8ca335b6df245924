"""Which gradient lies where."""

import torch

from torchbearer_ddp.gradients import buckets


def laid_out(parameters, bucket_bytes=10**6, header=5, groups=None):
    """The buckets, their tensors, and the view of each parameter."""
    indexed = dict(enumerate(parameters))
    made = buckets.plan(indexed, groups or [0] * len(parameters), bucket_bytes, header)
    tensors = [torch.zeros(bucket.size, dtype=bucket.dtype) for bucket in made]
    views = buckets.place(made, tensors, indexed)
    return made, tensors, [views[index] for index in indexed]


def test_each_parameter_has_exactly_one_place_in_its_own_shape_and_strides():
    parameters = [
        torch.ones(3, 4),
        torch.ones(()),
        torch.ones(0, 7),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(5, 4).t(),
        torch.ones(1, 3).expand(4, 3),
    ]
    made, tensors, views = laid_out(parameters)
    assert sorted(i for b in made for i in b.indices) == list(range(6))
    assert [view for b in made for view in b.views] == [views[i] for b in made for i in b.indices]
    for index, view in enumerate(views):
        assert view.shape == parameters[index].shape
        view.fill_(index)
    assert views[3].stride() == parameters[3].stride()
    assert views[4].stride() == parameters[4].stride()
    for index, view in enumerate(views):
        assert (view == index).all(), "two parameters share a place"
    assert tensors[-1][-5:].tolist() == [0] * 5, "a gradient lies in the header"


def test_one_dtype_a_bucket_and_the_header_where_it_is_exact():
    parameters = [torch.ones(4, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64)]
    made, *_ = laid_out(parameters)
    assert [len(b.indices) for b in made] == [1, 1, 1]
    assert made[-1].dtype in (torch.float32, torch.float64)
    only_half, *_ = laid_out([torch.ones(4, dtype=torch.float16)])
    assert [b.dtype for b in only_half] == [torch.float16, torch.float32]
    assert only_half[-1].numel == 0


def test_buckets_are_closed_at_their_size_and_filled_in_order():
    made, *_ = laid_out([torch.ones(100) for _ in range(6)], bucket_bytes=800)
    assert [b.indices for b in made] == [[0, 1], [2, 3], [4, 5]]


def test_groups_do_not_share_buckets_and_the_header_travels_alone():
    made, *_ = laid_out([torch.ones(4) for _ in range(4)], groups=[0, 1, 0, 1])
    assert [b.indices for b in made] == [[0, 2], [1, 3], []]
    assert [b.group for b in made[:2]] == [0, 1]
    assert [b.header for b in made] == [0, 0, 5]


def test_no_parameters_leave_only_the_header():
    made, tensors, _ = laid_out([])
    assert len(made) == 1
    assert tensors[0].numel() == 5
