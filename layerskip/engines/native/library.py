"""The C++ kernels, compiled for this machine when they are first needed, and their structs."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from layerskip.cpp_library import FLAGS, load_cpp

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = FLAGS


class Matrix(ctypes.Structure):
    """As in kernels.cpp, as the following ones."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_long),
        ("inputs", ctypes.c_long),
        ("kind", ctypes.c_long),
    ]


class Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_float)]


class Ending(ctypes.Structure):
    _fields_ = [("out", Matrix), ("norm", Norm), ("scale", ctypes.c_float), ("total", ctypes.c_float)]


class AttentionPart(ctypes.Structure):
    _fields_ = [
        ("norm", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("value_norm", Norm),
        ("qkv", Matrix),
        ("out", Ending),
        ("num_queries", ctypes.c_long),
        ("num_keys", ctypes.c_long),
        ("head_dim", ctypes.c_long),
        ("scaling", ctypes.c_float),
        ("is_gated", ctypes.c_int),
        ("reads", ctypes.c_int),
    ]


class LinearAttentionPart(ctypes.Structure):
    _fields_ = [
        ("norm", Norm),
        ("out_norm", Norm),
        ("in", Matrix),
        ("out", Ending),
        ("conv", ctypes.c_void_p),
        ("conv_bias", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("skips", ctypes.c_void_p),
        ("num_keys", ctypes.c_long),
        ("num_values", ctypes.c_long),
        ("key_dim", ctypes.c_long),
        ("value_dim", ctypes.c_long),
        ("taps", ctypes.c_long),
        ("num_groups", ctypes.c_long),
        ("corrects", ctypes.c_int),
    ]


class ShortConvPart(ctypes.Structure):
    _fields_ = [
        ("norm", Norm),
        ("in", Matrix),
        ("out", Ending),
        ("conv", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("taps", ctypes.c_long),
    ]


class Memory(ctypes.Structure):
    _fields_ = [
        ("live", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("older", ctypes.c_void_p),
        ("live_at", ctypes.c_long),
        ("kept_at", ctypes.c_long),
        ("older_at", ctypes.c_long),
        ("at", ctypes.c_long),
        ("log", ctypes.c_void_p),
        ("num_logged", ctypes.c_long),
        ("log_from", ctypes.c_long),
        ("several", ctypes.c_long),
    ]


class TokenGatePart(ctypes.Structure):
    _fields_ = [("in", Matrix), ("out", Ending), ("first", ctypes.c_long)]


class MlpPart(ctypes.Structure):
    _fields_ = [
        ("norm", Norm),
        ("gate_up", Matrix),
        ("down", Ending),
        ("activation", ctypes.c_int),
        ("gate", ctypes.POINTER(TokenGatePart)),
    ]


class ExpertsPart(ctypes.Structure):
    _fields_ = [
        ("norm", Norm),
        ("router", Matrix),
        ("shared_router", Matrix),
        ("shared_gate_up", Matrix),
        ("shared_down", Ending),
        ("gate_up", ctypes.POINTER(Matrix)),
        ("down", ctypes.POINTER(Matrix)),
        ("preferences", ctypes.c_void_p),
        ("num_experts", ctypes.c_long),
        ("num_chosen", ctypes.c_long),
        ("num_groups", ctypes.c_long),
        ("groups_chosen", ctypes.c_long),
        ("least", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("by_sigmoid", ctypes.c_int),
        ("sums_to_one", ctypes.c_int),
        ("rounds", ctypes.c_int),
        ("activation", ctypes.c_int),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_long),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_long),
        ("out", ctypes.c_void_p),
        ("gates", ctypes.c_void_p),
        ("gates_stride", ctypes.c_long),
        ("count", ctypes.c_int),
        ("is_float32", ctypes.c_int),
        ("num_threads", ctypes.c_int),
    ]


class Look(ctypes.Structure):
    _fields_ = [
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("states", ctypes.c_void_p),
        ("positions", ctypes.c_long),
        ("place", ctypes.c_long),
        ("first", ctypes.c_long),
        ("visible", ctypes.c_void_p),
        ("visible_stride", ctypes.c_long),
        ("count", ctypes.c_long),
    ]


class Text(ctypes.Structure):
    _fields_ = [
        ("looks", ctypes.POINTER(Look)),
        ("states", ctypes.POINTER(ctypes.c_void_p)),
        ("place", ctypes.c_long),
        ("count", ctypes.c_long),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("attention", ctypes.POINTER(AttentionPart)),
        ("linear_attention", ctypes.POINTER(LinearAttentionPart)),
        ("short_conv", ctypes.POINTER(ShortConvPart)),
        ("mlp", ctypes.POINTER(MlpPart)),
        ("experts", ctypes.POINTER(ExpertsPart)),
        ("look", ctypes.c_int),
        ("keys_only", ctypes.c_int),
    ]


@cache
def load_kernels() -> ctypes.CDLL | str:
    """See `load_cpp`."""
    library = load_cpp(SOURCE, _FLAGS)
    if not isinstance(library, str):
        for name in ("layerskip_attention", "layerskip_mlp", "layerskip_experts", "layerskip_linear"):
            getattr(library, name).restype = None
        library.layerskip_roll_back.restype = ctypes.c_bool
    return library
