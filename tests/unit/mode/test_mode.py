from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from bits import bits_equal
from calls import Counted, compiled, normal
from flash_attn_deterministic import (
    Mode,
    deterministic_mode,
    flash_attn_func,
    get_deterministic_mode,
    private,
    reference,
    set_deterministic_mode,
)
from flash_attn_deterministic import mode as current
from flash_attn_deterministic.errors import (
    ArgumentError,
    ArgumentTypeError,
    FlashAttnError,
    MissingInstanceError,
    ModeError,
)


@pytest.fixture(autouse=True)
def default_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts with the default mode, and has to leave all its blocks."""
    monkeypatch.setattr(current, "_process_mode", Mode(True, 2048))
    yield
    assert current._thread.box.mode is None
    assert private.get_state(current._KEY) is None


def in_thread(function: Any) -> Any:
    """Runs a function in a thread, and returns its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


# --- Process and threads ------------------------------------------------------------------------


def test_set_applies_to_all_threads() -> None:
    set_deterministic_mode(split_size=512)
    assert get_deterministic_mode() == Mode(enabled=True, split_size=512)
    assert in_thread(get_deterministic_mode) == Mode(enabled=True, split_size=512)


def test_arguments_that_are_not_given_keep_their_value() -> None:
    set_deterministic_mode(split_size=512)
    set_deterministic_mode(False)
    assert get_deterministic_mode() == Mode(enabled=False, split_size=512)
    set_deterministic_mode()
    assert get_deterministic_mode() == Mode(enabled=True, split_size=512)


def test_blocks_nest() -> None:
    with deterministic_mode(split_size=512):
        with deterministic_mode(enabled=False):
            assert get_deterministic_mode() == Mode(False, 512)
            with deterministic_mode(split_size=0):
                assert get_deterministic_mode() == Mode(True, 0)
        assert get_deterministic_mode() == Mode(True, 512)


def test_block_is_left_by_an_exception() -> None:
    with pytest.raises(KeyError), deterministic_mode(split_size=512):
        raise KeyError
    assert get_deterministic_mode().split_size == 2048


def test_set_inside_a_block_applies_after_it() -> None:
    with deterministic_mode(split_size=512):
        set_deterministic_mode(split_size=64)
        assert get_deterministic_mode().split_size == 512
        assert in_thread(get_deterministic_mode).split_size == 64
    assert get_deterministic_mode().split_size == 64


def test_decorator() -> None:
    @deterministic_mode(split_size=512)
    def inner(depth: int) -> list[int]:
        """Says so."""
        here = [get_deterministic_mode().split_size]
        return here if depth == 0 else here + inner(depth - 1)

    assert inner(2) == [512, 512, 512]
    assert inner.__doc__ == "Says so."
    assert get_deterministic_mode().split_size == 2048


def test_blocks_left_in_any_order() -> None:
    """As generators and tasks leave them whose blocks span a yield or an await."""
    blocks = {size: deterministic_mode(split_size=size) for size in (64, 128, 192)}
    for block in blocks.values():
        block.__enter__()
    for leave, then in ((128, 192), (192, 64), (64, 2048)):
        blocks[leave].__exit__()
        assert get_deterministic_mode().split_size == then
        assert current._mode_of_backward() in (Mode(True, then), None)


def _holder(split_size: int) -> Iterator[int]:
    with deterministic_mode(split_size=split_size):
        yield get_deterministic_mode().split_size


def test_another_thread_ends_a_block_inside_its_own() -> None:
    held = _holder(64)
    assert next(held) == 64

    def other() -> tuple[int, int]:
        with deterministic_mode(split_size=128):
            next(held, None)
            inside = get_deterministic_mode().split_size
        return inside, get_deterministic_mode().split_size

    assert in_thread(other) == (128, 2048)
    assert get_deterministic_mode() == Mode(True, 2048)
    assert private.get_state(current._KEY) is None
    set_deterministic_mode(split_size=512)
    assert get_deterministic_mode() == Mode(True, 512)


def test_one_object_can_be_entered_again_inside_itself_and_in_another_thread() -> None:
    mode = deterministic_mode(split_size=64)
    for _ in range(2):
        with mode, deterministic_mode(split_size=128), mode:
            assert get_deterministic_mode().split_size == 64
        assert get_deterministic_mode().split_size == 2048

    def other() -> list[int]:
        sizes = []
        with deterministic_mode(split_size=128):
            with mode:
                sizes.append(get_deterministic_mode().split_size)
            sizes.append(get_deterministic_mode().split_size)
        return [*sizes, get_deterministic_mode().split_size]

    with mode:
        assert in_thread(other) == [64, 128, 2048]
        assert get_deterministic_mode().split_size == 64
    assert get_deterministic_mode() == Mode(True, 2048)


def test_many_threads_end_blocks_of_another_one() -> None:
    """The other thread enters and leaves its own blocks at the same time."""
    held = [_holder(64 * (i + 2)) for i in range(400)]
    for each in held:
        next(each)
    threads = [
        threading.Thread(target=lambda part=part: [next(x, None) for x in held[part::4]])
        for part in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with deterministic_mode(split_size=64):
            pass
    for thread in threads:
        thread.join()
    assert get_deterministic_mode() == Mode(True, 2048)
    assert current._thread.box.entries == []


# --- Errors -------------------------------------------------------------------------------------


async def _coroutine() -> None:
    await asyncio.sleep(0)


def _generator() -> Iterator[int]:
    yield 0


async def _async_generator() -> AsyncIterator[int]:
    yield 0


class _AsyncCall:
    async def __call__(self) -> None:
        await asyncio.sleep(0)


def test_objects_that_can_be_decorated() -> None:
    class Call:
        def __call__(self, x: int) -> tuple[int, int]:
            return get_deterministic_mode().split_size, x

        method = __call__

    for function in (Call(), Call().method, functools.partial(Call(), 3)):
        inside = deterministic_mode(split_size=512)(function)
        assert inside(*(() if isinstance(function, functools.partial) else (3,))) == (512, 3)
    module = torch.nn.Identity()
    assert deterministic_mode(split_size=512)(module)(7) == 7


@pytest.mark.parametrize(("function", "kind"), [
    pytest.param(_coroutine, "a coroutine function", id="coroutine"),
    pytest.param(_generator, "a generator function", id="generator"),
    pytest.param(_async_generator, "an async generator function", id="async-generator"),
    pytest.param(_AsyncCall, r"the class [\w.]*_AsyncCall; decorate its methods", id="class"),
    pytest.param(512, "int, which can't be called", id="number"),
])  # fmt: skip
def test_functions_that_cannot_be_decorated(function: Any, kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"function: expected .* got {kind}"):
        deterministic_mode(split_size=512)(function)


@pytest.mark.parametrize(("function", "kind"), [
    pytest.param(lambda: _generator(), "generator", id="generator"),
    pytest.param(lambda: _async_generator(), "async_generator", id="async-generator"),
    pytest.param(lambda: _coroutine(), "coroutine", id="coroutine"),
])  # fmt: skip
def test_functions_that_return_a_coroutine_or_generator(function: Any, kind: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"got one that returned a {kind}, whose body"):
        deterministic_mode(split_size=512)(function)()
    assert get_deterministic_mode() == Mode(True, 2048)


def test_exit_without_enter() -> None:
    mode = deterministic_mode(split_size=512)
    with pytest.raises(ModeError, match="expected __exit__ after __enter__"):
        mode.__exit__()
    with mode:
        pass
    with pytest.raises(ModeError, match="one more exit than entries"):
        mode.__exit__()
    assert issubclass(ModeError, RuntimeError)
    assert get_deterministic_mode() == Mode(True, 2048)


@pytest.mark.parametrize("use", [set_deterministic_mode, deterministic_mode], ids=["set", "with"])
@pytest.mark.parametrize(("arguments", "error", "message"), [
    pytest.param({"split_size": 100}, ArgumentError,
        r"split_size: expected a multiple of 64.* got 100; the nearest valid: 64 and 128",
        id="between"),
    pytest.param({"split_size": 64.0}, ArgumentTypeError, "split_size: .* got float", id="float"),
    pytest.param({"enabled": 512}, ArgumentTypeError, "enabled: expected a bool, got int",
        id="enabled"),
    pytest.param({"keep_residual": 1}, ArgumentTypeError,
        "keep_residual: expected a bool, or None for the mode's, got int", id="keep_residual"),
])  # fmt: skip
def test_wrong_arguments(
    use: Any, arguments: dict[str, Any], error: type[FlashAttnError], message: str
) -> None:
    with pytest.raises(error, match=message):
        use(**arguments)
    assert get_deterministic_mode() == Mode(True, 2048)


@pytest.mark.parametrize("use", [set_deterministic_mode, deterministic_mode], ids=["set", "with"])
def test_wheel_without_deterministic_kernels(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_WHEEL_DETERMINISTIC", False)
    with pytest.raises(MissingInstanceError, match=r"enabled: .*DETERMINISTIC=OFF.*enabled=False"):
        use()
    use(enabled=False)


# --- Environment --------------------------------------------------------------------------------


@pytest.mark.parametrize(("environ", "expected"), [
    pytest.param({}, Mode(True, 2048), id="none"),
    pytest.param({"FA2_DETERMINISTIC": "", "FA2_SPLIT_SIZE": " "}, Mode(True, 2048), id="empty"),
    pytest.param({"FA2_DETERMINISTIC": "0"}, Mode(False, 2048), id="off"),
    pytest.param({"FLASH_ATTENTION_DETERMINISTIC": "0"}, Mode(False, 2048), id="new-off"),
    pytest.param({"FLASH_ATTENTION_SPLIT_SIZE": "64"}, Mode(True, 64), id="new-split"),
    pytest.param({"FLASH_ATTENTION_SPLIT_SIZE": "64", "FA2_SPLIT_SIZE": "128"}, Mode(True, 64),
        id="two"),
    pytest.param({"FA2_DETERMINISTIC": "True"}, Mode(True, 2048), id="true"),
    pytest.param({"FA2_SPLIT_SIZE": "0"}, Mode(True, 0), id="one-split"),
    pytest.param({"FA2_DETERMINISTIC": "no", "FA2_SPLIT_SIZE": "512"}, Mode(False, 512), id="both"),
])  # fmt: skip
def test_environment(environ: dict[str, str], expected: Mode) -> None:
    assert current._read_environment(environ, True) == expected


@pytest.mark.parametrize(("environ", "message"), [
    pytest.param({"FA2_DETERMINISTIC": "maybe"}, "FA2_DETERMINISTIC: expected .* got 'maybe'",
        id="flag"),
    pytest.param({"FA2_SPLIT_SIZE": "big"}, "FA2_SPLIT_SIZE: .* got 'big'", id="no-number"),
    pytest.param({"FA2_SPLIT_SIZE": "536870976"},
        r"FA2_SPLIT_SIZE: expected .* up to 2\*\*29, .* got 536870976", id="too-large"),
    pytest.param({"FA2_SPLIT_SIZE": "6_4"}, "FA2_SPLIT_SIZE: .* got '6_4'", id="underscore"),
    pytest.param({"FA2_SPLIT_SIZE": "100"},
        "FA2_SPLIT_SIZE: .* got 100; the nearest valid: 64 and 128", id="no-multiple"),
    pytest.param({"FA2_SPLIT_SIZE": "1" * 5000}, r"FA2_SPLIT_SIZE: .* got '1+\.\.\.1+';",
        id="5000-digits"),
    pytest.param({"FLASH_ATTENTION_FAMILY": "hopper"},
        "FLASH_ATTENTION_FAMILY: expected sm80 or sm90, got 'hopper'", id="family"),
])  # fmt: skip
def test_wrong_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        current._read_environment(environ, True)


def test_environment_of_a_wheel_without_deterministic_kernels() -> None:
    assert current._read_environment({}, False) == Mode(False, 2048)
    assert current._read_environment({"FA2_DETERMINISTIC": "0"}, False) == Mode(False, 2048)
    with pytest.raises(MissingInstanceError, match=r"FA2_DETERMINISTIC: .*unset it or set it to 0"):
        current._read_environment({"FA2_DETERMINISTIC": "1"}, False)


def run_python(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("FA2_", "FLASH_"))
    }
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env={**clean, **environ})


def test_environment_is_read_at_import_only() -> None:
    script = (
        "import os, flash_attn_deterministic as f; os.environ['FA2_SPLIT_SIZE'] = '64';"
        "print(f.get_deterministic_mode())"
    )
    result = run_python(script, FA2_DETERMINISTIC="0", FA2_SPLIT_SIZE="512")
    assert result.stdout == "Mode(enabled=False, split_size=512, keep_residual=False)\n", (
        result.stderr
    )


def test_wrong_environment_fails_calls_until_a_mode_is_set() -> None:
    script = """
import torch
import flash_attn_deterministic as f
q = torch.ones(1, 4, 2, 32, dtype=torch.bfloat16)
def refused(call):
    try:
        call()
    except f.FlashAttnError as error:
        assert isinstance(error, ValueError), error
        assert str(error).startswith("FA2_SPLIT_SIZE: expected "), error
        return len(str(error)) < 300
refusals = [f.get_deterministic_mode, lambda: f.flash_attn_func(q, q, q),
            lambda: torch.compile(f.flash_attn_func, backend="eager")(q, q, q),
            f.deterministic_mode().__enter__, f.set_deterministic_mode]
assert all(map(refused, refusals))
with f.deterministic_mode(split_size=64):
    f.flash_attn_func(q, q, q)
assert refused(f.get_deterministic_mode)
f.set_deterministic_mode(split_size=64)
f.flash_attn_func(q, q, q)
print(f.get_deterministic_mode())
"""
    result = run_python(script, FA2_SPLIT_SIZE="1" * 5000)
    assert result.stdout == "Mode(enabled=True, split_size=64, keep_residual=False)\n", (
        result.stderr
    )


def test_help_and_info_work_in_a_wrong_environment() -> None:
    script = (
        "import sys; from flash_attn_deterministic.__main__ import main;"
        "sys.exit(main(sys.argv[1:] or {}))"
    )
    result = run_python(script.format(["--help"]), FA2_SPLIT_SIZE="100")
    assert result.returncode == 0, result.stderr
    assert "usage: flash-attn-deterministic" in result.stdout
    result = run_python(script.format(["info"]), FA2_SPLIT_SIZE="100")
    assert result.returncode == 0, result.stderr
    assert "mode           FA2_SPLIT_SIZE: expected" in result.stdout


# --- The mode of a call -------------------------------------------------------------------------


def long_call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Enough keys that each split size gives different bits."""
    return normal(1, 40, 1, 32), normal(1, 400, 1, 32, seed=1), normal(1, 400, 1, 32, seed=2)


def expected(split_size: int) -> torch.Tensor:
    return reference.attention(*long_call(), split_size=split_size)[0]


def test_split_sizes_give_different_bits() -> None:
    sizes = (0, 64, 128, 192)
    outs = [expected(size) for size in sizes]
    same = [
        (sizes[i], sizes[j])
        for i in range(len(sizes))
        for j in range(i)
        if bits_equal(outs[i], outs[j])
    ]
    assert same == []


def test_call_follows_the_mode() -> None:
    set_deterministic_mode(split_size=64)
    assert bits_equal(flash_attn_func(*long_call()), expected(64))
    with deterministic_mode(split_size=128):
        assert bits_equal(flash_attn_func(*long_call()), expected(128))


def test_split_size_of_the_call_overrides_the_mode() -> None:
    with deterministic_mode(split_size=64):
        assert bits_equal(flash_attn_func(*long_call(), split_size=128), expected(128))
        assert bits_equal(flash_attn_func(*long_call(), split_size=0), expected(0))


def test_split_size_has_no_effect_where_the_mode_is_off() -> None:
    with deterministic_mode(enabled=False, split_size=64):
        assert bits_equal(flash_attn_func(*long_call(), split_size=128), expected(0))


# --- torch.compile ------------------------------------------------------------------------------


class Checked(Counted):
    """A compiled function of which each call's bits are checked."""

    def check(self, split_size: int, compilations: int) -> None:
        """Checks the bits of a call, and the number of compilations so far."""
        assert bits_equal(self(*long_call()), expected(split_size))
        assert self.count == compilations


def test_compiled_function_follows_the_mode() -> None:
    Checked(lambda q, k, v: flash_attn_func(q, k, v, split_size=128)).check(128, 1)
    Checked(deterministic_mode(split_size=128)(flash_attn_func)).check(128, 1)
    counted = Checked(flash_attn_func)
    counted.check(2048, 1)
    counted.check(2048, 1)
    set_deterministic_mode(split_size=64)
    counted.check(64, 2)
    with deterministic_mode(split_size=128):
        counted.check(128, 3)
    counted.check(64, 3)
    set_deterministic_mode(False)
    counted.check(0, 4)


def test_compiled_function_follows_the_mode_of_its_thread() -> None:
    counted = Checked(flash_attn_func)
    counted.check(2048, 1)
    with deterministic_mode(split_size=128):
        counted.check(128, 2)
        in_thread(lambda: counted.check(2048, 2))

        def other() -> None:
            with deterministic_mode(split_size=64):
                counted.check(64, 3)
                counted.check(64, 3)

        in_thread(other)
        counted.check(128, 3)


def test_first_compiled_in_a_thread_with_its_own_mode() -> None:
    counted = Checked(flash_attn_func)

    def other() -> None:
        with deterministic_mode(split_size=64):
            counted.check(64, 1)

    in_thread(other)
    counted.check(2048, 2)


def test_block_inside_a_compiled_function() -> None:
    def thrice(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        before = flash_attn_func(q, k, v)
        with deterministic_mode(enabled=False), deterministic_mode(split_size=128):
            inside = flash_attn_func(q, k, v)
        return before, inside, flash_attn_func(q, k, v)

    function = compiled(thrice)
    for around in (2048, 64):
        with deterministic_mode(split_size=around):
            outs = function(*long_call())
            assert get_deterministic_mode().split_size == around
        for out, split_size in zip(outs, (around, 128, around), strict=True):
            assert bits_equal(out, expected(split_size))


def test_compiled_function_that_is_decorated() -> None:
    """functools.wraps copies the attributes by which torch recognises a compiled function."""
    function = compiled(flash_attn_func)
    decorated = deterministic_mode(split_size=128)(function)

    def calls_it(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return decorated(q, k, v)  # type: ignore[no-any-return]

    for inside in (
        decorated,
        torch.compile(decorated, backend="eager"),
        torch.compile(calls_it, backend="eager"),
    ):
        assert bits_equal(inside(*long_call()), expected(128))
    assert bits_equal(function(*long_call()), expected(2048))


def test_mode_set_by_a_compiled_function() -> None:
    def set_and_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        set_deterministic_mode(split_size=64)
        return flash_attn_func(q, k, v)

    Checked(set_and_call).check(64, 1)
    assert get_deterministic_mode() == Mode(True, 64)


def test_compiled_function_cannot_set_a_wrong_mode() -> None:
    def set_and_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        set_deterministic_mode(split_size=100)
        return flash_attn_func(q, k, v)

    torch._dynamo.reset()
    with pytest.raises(ArgumentError, match=r"split_size: .* got 100"):
        torch.compile(set_and_call, backend="aot_eager")(*long_call())
    assert get_deterministic_mode() == Mode(True, 2048)


def test_compiled_function_does_not_depend_on_how_blocks_nest() -> None:
    counted = Checked(flash_attn_func)
    with deterministic_mode(split_size=64):
        counted.check(64, 1)
        with deterministic_mode(split_size=128), deterministic_mode(split_size=64):
            counted.check(64, 1)


def test_wrong_split_size_fails_in_a_compiled_call_too() -> None:
    """With fullgraph torch reports what is raised while it traces as an error of its own."""
    message = "got 100; the nearest valid: 64 and 128"
    for fullgraph, error in ((False, ArgumentError), (True, torch._dynamo.exc.Unsupported)):
        torch._dynamo.reset()
        function: Any = torch.compile(flash_attn_func, fullgraph=fullgraph, backend="aot_eager")
        with pytest.raises(error, match=message):
            function(*long_call(), split_size=100)
