"""Fixtures for tests of Triton kernels."""

import os
import subprocess
import sys

import pytest

KINDS = {"": "*bf16", "f": "*fp32", "d": "*fp64", "i": "*i8"}


@pytest.fixture
def interpreted():
    """Returns a function that runs tests with Triton's interpreter and returns what they print.

    The interpreter must be enabled before kernels are imported.
    """

    def run(file: str, *options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, *options]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    return run


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
