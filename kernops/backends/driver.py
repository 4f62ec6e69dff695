"""The few calls of the CUDA driver that a compiled kernel needs, through ctypes.

Importing CuPy takes longer than a whole first call from a warm cache may (50 ms), and a launch through ctypes costs
less, so CuPy serves the compiler only (``nvrtc.py``). torch has loaded the driver by then.
"""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache

_DEFAULT_SHARED = 48 << 10  # bytes of dynamic shared memory that need no permission
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_...
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_...

_int, _ptr = ctypes.c_int, ctypes.c_void_p
_SIGNATURES = {
    "cuModuleLoadData": (ctypes.POINTER(_ptr), ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.POINTER(_ptr), _ptr, ctypes.c_char_p),
    "cuFuncSetAttribute": (_ptr, _int, _int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_ptr), _int),
    "cuCtxSetCurrent": (_ptr,),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_int),),
    "cuGetErrorString": (_int, ctypes.POINTER(ctypes.c_char_p)),
}
_Params = ctypes.c_char_p * 1


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"the CUDA driver could not {what}: {(text.value or b'unknown error').decode()} ({status})")


def bind(device: int) -> None:
    """Make torch's context of a device the current one. A thread that torch has not yet worked in has none."""
    cuda, context = _library(), _ptr()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"find the context of device {device}")
    _check(cuda.cuCtxSetCurrent(context), f"use the context of device {device}")


def load(image: bytes) -> int:
    """A module from a cubin or PTX text, in the current context. It stays for the life of the process."""
    cuda, module = _library(), _ptr()
    mode = _int(_CAPTURE_MODE_RELAXED)  # a first call may come while its stream is being captured into a graph
    _check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "change the capture mode")
    try:
        _check(cuda.cuModuleLoadData(ctypes.byref(module), image), "load a compiled kernel")
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return module.value  # type: ignore[return-value]


def function(module: int, name: str, shared: int) -> int:
    """A kernel of a module, allowed to use so many bytes of dynamic shared memory."""
    cuda, handle = _library(), _ptr()
    _check(cuda.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"find the kernel {name}")
    if shared > _DEFAULT_SHARED:
        status = cuda.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        _check(status, f"give the kernel {name} {shared} bytes of shared memory")
    return handle.value  # type: ignore[return-value]


def launch(device: int, kernel: int, grid: int, threads: int, shared: int, stream: int, arguments: bytes) -> None:
    """Start a kernel whose one parameter is a struct, given as its bytes; the driver copies them before it returns.

    The call has no ``argtypes``, which would take longer than the rest of it: numbers go as C's int, addresses wrapped.
    """
    params = _Params(arguments)
    status = _library().cuLaunchKernel(_ptr(kernel), grid, 1, 1, threads, 1, 1, shared, _ptr(stream), params, None)
    if status == _NO_CONTEXT:
        bind(device)
        status = _library().cuLaunchKernel(_ptr(kernel), grid, 1, 1, threads, 1, 1, shared, _ptr(stream), params, None)
    if status:
        _check(status, f"start a kernel of {grid} blocks of {threads} threads")
