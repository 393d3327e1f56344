"""The rank grid against megatron-core's own generator of rank groups."""

import pytest
from megatron.core.parallel_state import RankGenerator

from hpc_rl.errors import UserError
from hpc_rl.parallel.layout import Layout, generation_order, replica_of

GRIDS = [
    Layout(8), Layout(8, tp=2), Layout(8, tp=2, pp=2), Layout(16, tp=2, pp=2, cp=2), Layout(16, tp=4, cp=2),
    Layout(16, tp=2, pp=2, ep=4, etp=1), Layout(32, tp=2, cp=2, pp=2, ep=4, etp=2), Layout(24, tp=3, pp=2, dp=4),
]  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_equal_megatron_core(grid: Layout) -> None:
    dense = RankGenerator(tp=grid.tp, ep=1, dp=grid.dp, pp=grid.pp, cp=grid.cp, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=grid.etp, ep=grid.ep, dp=grid.edp, pp=grid.pp, cp=1, order="tp-cp-ep-dp-pp")
    for axes in ("tp", "dp", "pp", "cp", "tp-pp", "dp-cp", "tp-dp-cp"):
        assert sorted(grid.groups(*axes.split("-"))) == sorted(dense.get_ranks(axes)), axes
    for ours, theirs in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("etp-ep", "tp-ep")):
        assert sorted(grid.groups(*ours.split("-"))) == sorted(expert.get_ranks(theirs)), ours


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_coords_name_the_place_in_each_group(grid: Layout) -> None:
    for rank in range(grid.world_size):
        at = grid.coords(rank)
        assert grid.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
            (group,) = [g for g in grid.groups(axis) if rank in g]
            assert group.index(rank) == getattr(at, axis)


def test_layers_even_uneven_and_interleaved() -> None:
    assert Layout(4, pp=4).layers_of(3, 8) == ((6, 7),)
    assert [len(Layout(4, pp=4).layers_of(p, 30)[0]) for p in range(4)] == [7, 8, 8, 7]
    assert Layout(2, pp=2, chunk_layers=(1, 3)).layers_of(1, 4) == ((1, 2, 3),)
    # The example in megatron-core's initialize_model_parallel: 16 layers, pp 4, vpp 2 (there counted from 1).
    assert Layout(4, pp=4, vpp=2).layers_of(1, 16) == ((2, 3), (10, 11))
    every = [i for p in range(4) for chunk in Layout(4, pp=4, vpp=2).layers_of(p, 19) for i in chunk]
    assert sorted(every) == list(range(19))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 16, "tp": 2, "pp": 2, "dp": 3},
         r"tp\*pp\*cp\*dp = 2\*2\*1\*3 = 12, but world size is 16: set dp to 4"),
        ({"world_size": 10, "tp": 4}, "tp.* = 4 does not divide the world size 10: use 12 ranks"),
        ({"world_size": 8, "tp": 2, "pp": 2, "ep": 4}, "etp.*= 2.4.2 = 16 does not divide the world size 8"),
        ({"world_size": 8, "vpp": 2}, "interleaving needs pp > 1"),
        ({"world_size": 8, "tp": 0}, "tp is 0"),
        ({"world_size": 8, "pp": 2, "chunk_layers": (1,)}, "chunk_layers has 1 entries"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_named(sizes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Layout(**sizes)


def test_layers_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="adds up to 4, but the model has 5 layers"):
        Layout(2, pp=2, chunk_layers=(1, 3)).layers_of(0, 5)
    with pytest.raises(UserError, match="the model has 3: lower pp"):
        Layout(4, pp=4).layers_of(0, 3)


@pytest.mark.parametrize(("train_tp", "gen_tp"), [(1, 1), (1, 4), (2, 4), (4, 4), (4, 2), (8, 2), (8, 1), (3, 2)])
def test_generation_replicas_are_whole_and_ascending(train_tp: int, gen_tp: int) -> None:
    order = generation_order(24 * gen_tp, gen_tp, train_tp)
    assert sorted(order) == list(range(24 * gen_tp))
    for place, rank in enumerate(order):
        assert replica_of(rank, gen_tp, train_tp) == divmod(place, gen_tp)
    for begin in range(0, len(order), gen_tp):
        assert order[begin : begin + gen_tp] == sorted(order[begin : begin + gen_tp])  # as torch sorts a group


def test_generation_shards_hold_the_training_shards() -> None:
    for rank in range(8):  # training TP8: rank r holds rows r/8 .. (r + 1)/8; generation TP2: halves
        replica, place = replica_of(rank, 2, 8)
        assert place == (0 if rank < 4 else 1) and replica == rank % 4
