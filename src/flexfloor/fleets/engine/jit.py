"""Numba, set up for kernels whose result for a row does not depend on the other rows of the batch."""

from __future__ import annotations

from llvmlite import ir

from flexfloor.world.jit import numba

kernel = numba.njit(fastmath=True, nogil=True, cache=True, boundscheck=False, error_model="numpy")
"""Compiled with reassociation allowed: the order of a sum is fixed at compile time, and is the same for every row."""

exact_kernel = numba.njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
"""Compiled to plain IEEE arithmetic in source order."""


@numba.extending.intrinsic
def prefetch(typing, array, index):
    """Ask for the cache line of array[index], a flat array of any dtype; changes no value."""

    def generate(context, builder, signature, arguments):
        pointer = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        line = builder.bitcast(builder.gep(pointer, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(call, [line, number(0), number(2), number(1)])  # to read, into the second-level cache, data
        return context.get_dummy_value()

    return numba.types.void(array, index), generate
