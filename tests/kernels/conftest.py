"""Fixtures for tests of Triton kernels."""

import os

import pytest

KINDS = {"": "*bf16", "f": "*fp32", "d": "*fp64", "i": "*i8"}


@pytest.fixture
def compiled_for_hopper():
    """Returns a function that compiles a kernel without a GPU.

    Pointers are given as "name:kind name ...", with the kinds of KINDS.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton's compiler, not its interpreter")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def compiled(kernel, pointers: str, constants: dict, numbers: dict[str, str]) -> None:
        pairs = (pointer.partition(":") for pointer in pointers.split())
        types = {name: KINDS[kind] for name, _, kind in pairs} | numbers
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        sizes = {name: size for name, size in constants.items() if name in signature}
        options = {
            name: constants[name] for name in ("num_warps", "num_stages") if name in constants
        }
        source = ASTSource(kernel, signature, constexprs=sizes)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert "ptx" in made.asm

    return compiled
