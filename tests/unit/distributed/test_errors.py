"""Bad input over several ranks: each rank raises, and none waits forever."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import flash_attn_deterministic as package
import flash_attn_deterministic.distributed as distributed
import pytest
import rank_functions as ranks
import torch
from bits import bits_equal
from calls import int32
from flash_attn_deterministic.distributed import ring_flash_attn
from flash_attn_deterministic.distributed.agreement import VARIABLE
from flash_attn_deterministic.distributed.ranks import Ranks, find_group
from flash_attn_deterministic.distributed.ring_flash_attn import (
    llama3_flash_attn_prepare_cu_seqlens,
)
from flash_attn_deterministic.errors import UnsupportedError
from rank_pool import Pool, pool_of

from tests.gpu.ranks import dying_rank


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with pool_of(2) as two:
        yield two


def dense(
    seqlen: int = 8,
    nheads_k: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    requires_grad: bool = False,
    seqlen_q: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Returns the arguments of a call on a rank; seqlen_q 0: that of keys."""
    sizes = (seqlen_q or seqlen, 4), (seqlen, nheads_k)
    q, k = (torch.ones(1, *size, 16, dtype=dtype) for size in sizes)
    return {"q": q.requires_grad_(requires_grad), "k": k, "v": k, **options}


def varlen(starts: list[int], **options: Any) -> dict[str, Any]:
    """Likewise of packed sequences with 8 tokens on the rank."""
    packed = {name: tensor[0] for name, tensor in dense().items()}
    cu_seqlens = int32(*starts)
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return {**packed, **lengths, "max_seqlen_q": 8, "max_seqlen_k": 8, **options}


LLAMA3 = "ring_flash_attn.llama3_flash_attn_varlen_func"


def llama3(rank: int, **changes: Any) -> dict[str, Any]:
    """Returns the arguments of a call with ring-flash-attn's name on a rank."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    prepared = llama3_flash_attn_prepare_cu_seqlens(int32(0, 16), True, rank, 2)
    own = dict(zip(names, prepared, strict=True))
    return {**varlen([]), **own, "heads_k_stride": 1, "causal": True, **changes}


DENSE, VARLEN = "flash_attn_func", "flash_attn_varlen_func"
SAME, STARTS = "ArgumentError: expected the same on all 2 ranks", "ArgumentError: cu_seqlens_q: "
PREPARED = "ArgumentError: cu_seqlens_q, cu_seqlens_k, local_k_slice: "
_SINK: dict[str, Any] = {"learnable_sink": torch.ones(4)}
_PART: dict[str, Any] = {"tensor": torch.zeros(3), "dim": 0}
# What the second rank does in another way, and what each rank finds to differ.
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"seqlen": 10}, "q.shape[1]: 8 on rank 0, 10 on rank 1; k.shape[1]"),
    "KV heads": ({"nheads_k": 4}, "k.shape[2]: 2 on rank 0, 4 on rank 1"),
    "dtype": ({"dtype": torch.float16}, "q.dtype: torch."),
    "order": ({"order": "zigzag"}, "order: "),
    "mask": ({"causal": True}, "the right window: -1 on rank 0, 0 on rank 1"),
    "scale": ({"softmax_scale": 0.5}, "softmax_scale: 0.25 on rank 0, 0.5 on rank 1"),
    "degree": ({"ulysses_degree": 2}, "ulysses_degree (0: None): 0 on rank 0, 2 on rank 1"),
    "stride": ({"heads_k_stride": 1}, "heads_k_stride (0: None): 0 on rank 0, 1 on rank 1"),
    "split size": ({"split_size": 64}, "split_size: 2048 on rank 0, 64 on rank 1"),
    # Otherwise a rank would wait in its backward for one that has none.
    "gradient": ({"requires_grad": True},
        "whether an input requires a gradient: 0 on rank 0, 1 on rank 1"),
    "sink": (_SINK, "whether there is a learnable_sink: 0 on rank 0, 1 on rank 1"),
}  # fmt: skip
# What all ranks ask for, and what each raises.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "odd zigzag": ({"seqlen": 7, "order": "zigzag"}, "q: expected an even number of tokens"),
    "unknown order": ({"order": "striped"}, "order: expected one of contiguous, zigzag"),
    "order no str": ({"order": 3}, "order: expected a str"),
    "stride": ({"heads_k_stride": 3}, "heads_k_stride: expected 1 to 2, got 3"),
    "stride of none": ({"heads_k_stride": 0}, "heads_k_stride: expected 1 to 2, got 0"),
    "stride below": ({"heads_k_stride": -1}, "heads_k_stride: expected 1 to 2, got -1"),
    "stride no int": ({"heads_k_stride": 1.0}, "heads_k_stride: expected an int, got float"),
    "degree of none": ({"ulysses_degree": 0}, "ulysses_degree: expected a divisor of 2 ranks and"),
    "degree beyond": ({"ulysses_degree": 4}, "of 2 ranks and of 2 KV heads, got 4"),
    "slopes": ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: expected None"),
    "float32": ({"dtype": torch.float32}, "q: expected dtype torch.float16 or"),
    "sink with gradient": ({"learnable_sink": torch.ones(4).requires_grad_()},
        "UnsupportedError: learnable_sink: expected one that requires no gradient"),
    "sink and empty rows": ({**_SINK, "seqlen_q": 16, "causal": True},
        "UnsupportedError: learnable_sink: expected None on several ranks where rows"),
}  # fmt: skip
# cu_seqlens, order, and what each rank raises.
LENGTHS: dict[str, tuple[list[int], str, str]] = {
    "falling": ([0, 9, 4], "contiguous", "numbers that don't decrease, got [0, 9, 4]"),
    "first": ([1, 16], "contiguous", "expected a 0, then"),
    "beyond": ([0, 17], "contiguous", "at most 16 tokens, 8 on each of 2 ranks, got 17"),
    "zigzag": ([0, 6, 16], "zigzag", "expected 10 tokens on each of 2 ranks"),
    "zigzag total": ([0, 12], "zigzag", "expected 6 tokens on each"),
}
# A function, calls of it by rank or one of all, the beginning of what each rank raises, and a part.
REFUSED: dict[str, tuple[str, list[dict[str, Any]], str, str]] = {
    **{f"another {name}": (DENSE, [dense(), dense(**change)], SAME,
        f"rank {{}} found a difference in {part}")
       for name, (change, part) in DIFFERENT.items()},
    **{name: (DENSE, [dense(**options)], "", part) for name, (options, part) in WRONG.items()},
    **{f"lengths: {name}": (VARLEN, [varlen(starts, order=order)], STARTS, part)
       for name, (starts, order, part) in LENGTHS.items()},
    "other lengths": (VARLEN, [varlen([0, 8, 16]), varlen([0, 4, 16])], SAME,
        "cu_seqlens_q: (0, 8, 16) on rank 0, (0, 4, 16) on rank 1"),
    "a longer part": ("unshard", [_PART, _PART | {"tensor": torch.zeros(4)}], SAME,
        "tensor.shape[0]: 3 on rank 0, 4 on rank 1"),
    "a part in another order": ("unshard", [_PART, _PART | {"order": "zigzag"}], SAME,
        "found a difference in order: contiguous on rank 0, zigzag on"),
    **{f"llama3: another {name}": (LLAMA3, [llama3(0), llama3(1, **{name: value})], PREPARED,
        "for one cu_seqlens, got others on rank 1")
       for name, value in (("cu_seqlens_k", int32(0, 12)), ("local_k_slice", slice(0, 12)))},
}  # fmt: skip


@pytest.mark.parametrize(("name", "calls", "begin", "part"), REFUSED.values(), ids=REFUSED)
def test_all_ranks_refuse(
    pool: Pool, name: str, calls: list[dict[str, Any]], begin: str, part: str
) -> None:
    for rank, message in enumerate(pool.run(ranks.raised, name, *calls)):
        assert message.startswith(begin)
        assert part.format(rank) in message


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("what", "heads", "part"), [
    ({"attn_mask": torch.ones(8, 8).bool()}, 4, "attn_mask: expected None over several"),
    ({}, 2, "key: expected 4 heads, as query, without enable_gqa, got 2"),
    ({"dropout_p": 0.5}, 4, r"dropout_p: expected 0\.0 on several ranks, got 0\.5"),
])  # fmt: skip
def test_sdpa(what: dict[str, Any], heads: int, part: str) -> None:
    q, k = (torch.ones(1, count, 8, 16, dtype=torch.bfloat16) for count in (4, heads))
    with distributed.SdpaOverRanks(), pytest.raises(package.FlashAttnError, match=part):
        torch.nn.functional.scaled_dot_product_attention(q, k, k, **what)


@pytest.mark.usefixtures("one_rank")
def test_double_backward_raises() -> None:
    call: Any = dense(requires_grad=True)
    out: Any = distributed.flash_attn_func(**call)
    (gradient,) = torch.autograd.grad(out.sum(), call["q"], create_graph=True)
    with pytest.raises(UnsupportedError, match=r"^double backward"):
        torch.autograd.grad(gradient.sum(), call["q"])


_QKV = torch.ones(1, 8, 3, 4, 16, dtype=torch.bfloat16)
# Name of a function, what its second rank passes, and what that raises.
ONE_WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unsupported": ("flash_attn_func", dense(dropout_p=0.5), "UnsupportedError: dropout_p: "),
    "keyword": ("flash_attn_func", dense(windows=3), "TypeError: "),
    "group": ("flash_attn_func", dense(group=3), "ArgumentTypeError: group: expected a torch"),
    "order": ("flash_attn_func", dense(order="x"), "ArgumentError: order: "),
    "q": ("flash_attn_func", dense() | {"q": None}, "ArgumentTypeError: q: expected a torch"),
    "packed": ("flash_attn_qkvpacked_func", {"qkv": _QKV[:, :, :2]},
        "ArgumentError: qkv: expected"),
    **{f"llama3: {got}": ("llama3", {"local_k_slice": value},
        f"ArgumentTypeError: local_k_slice: expected a slice of two ints, got {got}")
       for got, value in (
           ("slice(a tensor of dtype torch.float32 and shape (2,), 8)", slice(torch.ones(2), 8)),
           ("slice(0, 8, 2)", slice(0, 8, 2)), ("a tensor of dtype", torch.ones(2)),
       )},
    "lengths": ("llama3", {"cu_seqlens_k": [0, 8]},
        "ArgumentTypeError: cu_seqlens_k: expected a torch.Tensor"),
    "flag": ("llama3", {"causal": "yes"}, "ArgumentTypeError: causal: expected a bool"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "wrong", "part"), ONE_WRONG.values(), ids=ONE_WRONG)
def test_a_wrong_call_on_one_rank(pool: Pool, name: str, wrong: dict[str, Any], part: str) -> None:
    """The other rank raises at once; afterwards both can use the group."""
    good: dict[str, Any] = {"qkv": _QKV} if "qkv" in wrong else dense()
    if name == "llama3":
        name, good, wrong = LLAMA3, llama3(0), llama3(1, **wrong)
    begin = time.monotonic()
    first, second = pool.run(ranks.raised, name, good, wrong)
    assert second.startswith(part)
    assert first.startswith("RankError: rank 1 of 2 did not make the call that rank 0 makes")
    assert part in first
    # Of another shape, as ranks that have agreed on one would wait for messages in the next case.
    assert pool.run(ranks.raised, "flash_attn_func", dense(seqlen=4)) == ["", ""]
    assert time.monotonic() - begin < 30


def test_dtensors_on_one_rank_are_mixed(pool: Pool) -> None:
    first, second = pool.run(ranks.mixed_dtensors)
    assert second == "ArgumentError: q, k, v: expected three DTensors or none, got both kinds"
    assert first.startswith("RankError: rank 1 of 2 did not make the call")
    assert second in first


def test_a_mesh_in_another_order(pool: Pool) -> None:
    for message in pool.run(ranks.on_a_reversed_mesh):
        assert message.startswith("ArgumentError: mesh: expected ranks in ascending order")


# What two ranks do, one after another, after a forward and a backward of each shape if "settled":
# letters are shapes, capitals forwards, small ones the backwards of these.
STEPS: dict[str, tuple[tuple[str, str], str]] = {
    "forwards of other shapes": (("A", "B"), "ArgumentError: expected the same on all 2 ranks"),
    "forwards in another order": (("AB", "BA"), "ArgumentError: expected the same on all 2 ranks"),
    "backwards of one shape in another order": (("AAab", "AAba"),
        "found a difference in the number of the forward: "),
    "a forward against a backward": (("Aa", "AA"),
        "in call: backward on rank 0, forward on rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("settled", ["", "always"], ids=["first", "always"])
@pytest.mark.parametrize(("steps", "part"), STEPS.values(), ids=STEPS)
def test_other_calls_on_one_rank(
    pool: Pool, steps: tuple[str, str], part: str, settled: str
) -> None:
    """All ranks raise at once, and can use the group afterwards."""
    begin = time.monotonic()
    for message, good in pool.run(ranks.steps_raised, steps, settled):
        assert part in message
        assert good == ""
    assert time.monotonic() - begin < 30


def test_checks_end_after_a_step_and_begin_after_a_failure(pool: Pool) -> None:
    """All calls of the first step are told, and again after an error of any rank.

    Of lengths alone that are new, one forward is; checkpoints make two forwards a backward.
    """
    dense = {"first": 4, "second": 0, "failed": 1, "after": 4, "off": 0, "always": 4}
    packed = {"packed": 4, "packed again": 0, "packed anew": 1}
    checkpointed = {"checkpointed": 5, "checkpointed again": 0, "checkpointed, third": 0}
    for told in pool.run(ranks.told_in_steps):
        assert told == {**dense, **packed, **checkpointed}


@pytest.mark.usefixtures("one_rank")
def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sometimes")
    with pytest.raises(
        package.FlashAttnError,
        match=f"^{VARIABLE}: expected one of first, always, off, got 'sometimes'",
    ):
        distributed.flash_attn_func(**dense())


@pytest.mark.parametrize("settled", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("begun", "by"),
    [(False, ValueError), (True, ValueError), (True, KeyboardInterrupt)],
    ids=["before", "within", "interrupted"],
)
def test_an_error_in_a_backward_of_one_rank(
    settled: bool, begun: bool, by: type[BaseException]
) -> None:
    """The other rank is told while it waits for messages; the group is lost unless all know."""
    with pool_of(2, timeout=60) as two:
        begin = time.monotonic()
        (first, first_again), (second, second_again) = two.run(
            ranks.broken_backward, settled, begun, by
        )
        assert second == f"{by.__name__}: broken"
        assert first.startswith("RankError: rank 1 of 2 did not make the call")
        assert second in first
        if settled or begun:
            for message in (first_again, second_again):
                assert message.startswith("RankError: rank ")
                assert "this group can't be used any more, since" in message or begun is False
        else:
            assert (first_again, second_again) == ("", "")
        assert time.monotonic() - begin < 50


@pytest.mark.parametrize("name", ["bits_version", "the package's version", "compute capability"])
def test_a_rank_with_another_wheel(pool: Pool, name: str) -> None:
    for message in pool.run(ranks.other_wheel, name):
        assert message.startswith("ArgumentError: expected the same on all 2 ranks")
        assert f"a difference in {name}: 1 on rank 0, 2 on rank 1" in message


@pytest.mark.parametrize(("how", "when", "part"), [
    ("killed", "first", "rank 1 did not make call 1 of this group"),
    ("silent", "first", "rank 1 did not make call 1 of this group"),
    # Ranks wait for its messages then; gloo finds that the connection has ended.
    ("killed", "later", "rows and keys did not arrive: another"),
])  # fmt: skip
def test_a_rank_that_dies(how: str, when: str, part: str) -> None:
    """The program of the tests on two GPUs, which end as soon as the first rank does."""
    ended = dying_rank.run("cpu", how, 5, 20, {}, when)
    assert ended.status == 1
    assert f"RankError: rank 0 of 2: {part}" in ended.text
    assert ended.seconds < 30


def test_no_process_group() -> None:
    with pytest.raises(package.FlashAttnError, match=r"group: .* is not initialised"):
        distributed.flash_attn_func(**dense())


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank of two, with a backend that drops messages."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_unsupported_backends() -> None:
    with pytest.raises(NotImplementedError, match=r"expected the backend gloo .* got fake"):
        Ranks(find_group(None, None)).check(torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=r"expected the backend nccl .* got fake"):
        Ranks(find_group(None, None)).check(torch.device("cuda"))


@pytest.mark.usefixtures("alone")
def test_wrong_groups_and_meshes() -> None:
    with pytest.raises(TypeError, match=r"group: expected a torch.distributed.ProcessGroup"):
        find_group(3, None)
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh or None, got int"):
        find_group(None, 3)
    world = torch.distributed.group.WORLD
    with pytest.raises(ValueError, match="mesh: expected None together with group"):
        find_group(world, 3)
    with pytest.raises(NotImplementedError, match="q: expected a tensor on cpu or cuda, got meta"):
        Ranks(find_group(None, None)).check(torch.device("meta"))
    with pytest.raises(ValueError, match=r"tokens that divides by 2 ranks, got 7"):
        distributed.shard(torch.zeros(1, 7))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("leaf", [0, 1, 2], ids=["q", "k", "v"])
def test_residual_for_a_backward(leaf: int) -> None:
    """The backward over ranks has no argument for it; without a backward none is kept."""
    inputs = [torch.ones(1, 4, 2, 16, dtype=torch.bfloat16) for _ in range(3)]
    inputs[leaf].requires_grad_()
    found: Any = functools.partial(distributed.flash_attn_func, *inputs)
    with package.deterministic_mode(keep_residual=True):
        with pytest.raises(UnsupportedError, match="keep_residual: expected False on several"):
            found()
        with torch.no_grad():
            found()
    with package.deterministic_mode(keep_residual=False):
        found()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("arguments", "message"), [
    pytest.param({"tensor": [1.0]}, "tensor: expected a torch.Tensor, got list", id="list"),
    pytest.param({"dim": 2}, r"dim: expected a dimension .* \(1, 4\), got 2", id="dimension"),
    pytest.param({"dim": "1"}, "dim: expected an int, got str", id="dimension-type"),
    pytest.param({"order": torch.zeros(2)}, r"order: expected a str, got torch\.Tensor$",
        id="order"),
    pytest.param({"cu_seqlens": [0, 4]}, "cu_seqlens: expected a torch.Tensor, got list",
        id="lengths"),
])  # fmt: skip
def test_wrong_arguments_of_shard(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(package.FlashAttnError, match=message):
        distributed.shard(**{"tensor": torch.zeros(1, 4), "dim": 1, **arguments})
    if "cu_seqlens" not in arguments:
        with pytest.raises(package.FlashAttnError, match=message):
            distributed.unshard(**{"tensor": torch.zeros(1, 4), "dim": 1, **arguments})


@pytest.mark.parametrize(("starts", "rank", "size", "message"), [
    pytest.param([0, 3, 7], 0, 2, "a total that divides by 2 ranks, got 7", id="total"),
    pytest.param([0, 9, 4], 0, 2, "cu_seqlens: expected elements that do not", id="falling"),
    pytest.param([1, 4], 0, 1, "cu_seqlens: expected 0 as its first element", id="first"),
    pytest.param([0, 4], 2, 2, "rank: expected 0 to world_size - 1, got 2", id="rank"),
    pytest.param([0, 4], -1, 2, "rank: expected 0 to world_size - 1, got -1", id="negative"),
    pytest.param([0, 4], 0, 0, "got 0 with world_size 0", id="no-ranks"),
    pytest.param([0, 4], 0, 1.0, "world_size: expected an int, got float", id="float"),
])  # fmt: skip
def test_wrong_arguments_of_prepare(starts: list[int], rank: int, size: Any, message: str) -> None:
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(package.FlashAttnError, match=message):
        llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, rank, size)


@pytest.mark.usefixtures("one_rank")
def test_a_wrong_number_after_a_valid_call() -> None:
    """A call is checked once for its kind of arguments, of which these are a part."""
    q, starts = torch.ones(4, 2, 16, dtype=torch.bfloat16), torch.tensor([0, 4], dtype=torch.int32)
    for _ in range(2):
        distributed.flash_attn_varlen_func(q, q, q, starts, starts, 4, 4)
        for lengths, name in (((-1, 4), "max_seqlen_q"), ((4, -1), "max_seqlen_k")):
            with pytest.raises(package.FlashAttnError, match=f"{name}: expected .* got -1"):
                distributed.flash_attn_varlen_func(q, q, q, starts, starts, *lengths)


@pytest.mark.usefixtures("one_rank")
def test_lengths_that_are_written_to() -> None:
    """Their values are kept until then."""
    q, starts = torch.randn(8, 2, 16).bfloat16(), int32(0, 4, 8)
    for lengths in (int32(0, 4, 8), int32(0, 3, 8)):
        starts.copy_(lengths)
        call: Any = q, q, q, starts, starts, 5, 5
        out: Any = distributed.flash_attn_varlen_func(*call)
        assert bits_equal(out, package.flash_attn_varlen_func(*call))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own graph breaks
def test_compiled_calls_exchange_no_lengths_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    *own, place = llama3_flash_attn_prepare_cu_seqlens(int32(0, 4, 8), True, 0, 1)
    monkeypatch.setattr(ring_flash_attn, "_joined", None)  # whoever exchanges them fails
    q = torch.randn(8, 2, 16).bfloat16()
    attend: Any = torch.compile(ring_flash_attn.llama3_flash_attn_varlen_func, backend="eager")
    for _ in range(2):
        out = attend(q, q, q, *own, heads_k_stride=2, local_k_slice=place, causal=True)
    alone: Any = package.flash_attn_varlen_func
    assert bits_equal(out, alone(q, q, q, *own, causal=True))


def test_lengths_made_in_inference_mode() -> None:
    """Such tensors have no count of writes: what all ranks have is not kept with them."""
    with torch.inference_mode():
        starts = torch.tensor([0, 5, 8], dtype=torch.int32)
        own_q, own_k, *_ = llama3_flash_attn_prepare_cu_seqlens(starts, True, 1, 2)
    assert (own_q.tolist(), own_k.tolist()) == ([0, 1, 4], [0, 5, 8])


def test_lengths_in_a_list() -> None:
    with pytest.raises(TypeError, match=r"cu_seqlens: expected a torch\.Tensor, got list"):
        llama3_flash_attn_prepare_cu_seqlens([0, 4], True, 0, 2)  # type: ignore[arg-type]
