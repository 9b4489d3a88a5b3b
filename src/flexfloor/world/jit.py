"""Numba for the models of the world. Whoever compiles something imports it from here.

Numba fixes the features of the CPU it compiles for when the first function is declared, for a whole process. The
engine's kernels gain 1.2-1.4x from 512-bit vectors, which LLVM holds back from on CPUs with AVX-512: so the wish is set
here, before any import of numba.
"""

from __future__ import annotations

import os

import llvmlite.binding


def _prefer_wide_vectors() -> None:
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f") and "NUMBA_CPU_FEATURES" not in os.environ:
        os.environ["NUMBA_CPU_FEATURES"] = features.flatten() + ",-prefer-256-bit"


_prefer_wide_vectors()

import numba  # noqa: E402

__all__ = ["numba"]
