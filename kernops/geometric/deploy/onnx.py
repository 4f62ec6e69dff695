"""Models that use the splat as ONNX files: each splat becomes one node ``kernops::BevPool`` (``node.py``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from .bodies import attach
from .node import DOMAIN, OP, VERSION, import_package

#: Options of ``torch.onnx.export`` that have another name here.
RENAMED = {"opset_version": "opset", "f": "path"}


def export_onnx(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str] | None = None,
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    functions: bool = True,
    **options: Any,
) -> Any:
    """Export a model that uses :func:`kernops.geometric.splat` to ONNX.

    Each splat becomes one node ``kernops::BevPool``, whatever the variant and the back end of its plan. The plan's
    cells go into the file as a constant; where the model gets them as an input (``torch.ops.kernops.bev_pool``), the
    numbers of samples, depths, rows and columns can be dynamic. :func:`kernops.geometric.splat_features` and the sums
    by bucket cannot be exported.

    Args:
        model: the model, in evaluation mode.
        args: its inputs, as an example.
        path: the file to write; None writes none.
        dynamic_shapes: as in ``torch.onnx.export``.
        opset: version of the ONNX operators, at least 18; None takes torch's default.
        input_names, output_names: names in the file.
        functions: whether nodes get their bodies (:func:`with_functions`), so that onnxruntime runs the file.
        **options: anything else that ``torch.onnx.export`` takes. Entries of a ``custom_translation_table`` are added;
            ``dynamo`` can only be True.

    Returns:
        The ``torch.onnx.ONNXProgram``.

    Raises:
        ImportError: onnx, onnxscript or onnx_ir is not installed; ``pip install "kernops[onnx]"`` installs them.
        TypeError: ``opset`` is not an integer, or an option has another name here.
        ValueError: ``opset`` is too old, ``dynamo`` is not True, or the model calls another operator of kernops.

    Example:
        >>> import torch
        >>> from kernops.geometric import BEVGrid, SplatPlan, frustum, nuscenes_rig, splat
        >>> rig = nuscenes_rig().resized((256, 704))
        >>> grid = BEVGrid((-48.0, 48.0, 4.0), (-48.0, 48.0, 4.0), (-5.0, 3.0, 8.0))
        >>> plan = SplatPlan(rig, frustum((256, 704), (8, 22), (1.0, 60.0, 4.0)), grid)
        >>> class Pool(torch.nn.Module):
        ...     def forward(self, depth, feat):
        ...         return splat(depth, feat, plan)
        >>> program = export_onnx(Pool().eval(), (torch.rand(1, 6, 15, 8, 22), torch.rand(1, 6, 8, 22, 4)))
        >>> [node.op_type for node in program.model.graph]
        ['BevPool', 'Transpose']
    """
    import_package("onnxscript")
    _check_options(opset, options)
    table = {
        torch.ops.kernops.bev_pool.default: _translation(),
        **(options.pop("custom_translation_table", None) or {}),
    }
    options = {"verbose": False, **options, "input_names": input_names, "output_names": output_names, "dynamo": True}
    try:
        program = torch.onnx.export(
            model,
            args,
            dynamic_shapes=dynamic_shapes,
            opset_version=opset,
            custom_translation_table=table,
            **options,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        name = _untranslated(error)
        if name is None:
            raise
        raise ValueError(
            f"of the operators of kernops.geometric, splat alone can be exported to ONNX; the model calls {name} "
            "(splat_features and bucketed_sum do)"
        ) from error
    assert program is not None
    if functions:
        attach(program.model)
    if path is not None:
        program.save(path)
    return program


def _check_options(opset: object, options: dict[str, Any]) -> None:
    if opset is not None and not isinstance(opset, int):
        raise TypeError(f"opset must be an integer or None; got {opset!r}")
    if opset is not None and opset < 18:
        raise ValueError(f"opset must be at least 18, the oldest that torch.onnx.export writes; got {opset}")
    if options.get("dynamo", True) is not True:
        raise ValueError(f"dynamo must be True: the older exporter cannot write a splat; got {options['dynamo']!r}")
    for name in sorted(RENAMED.keys() & options.keys()):
        raise TypeError(f"{name} is called {RENAMED[name]} here; got {name}={options[name]!r}")


def _untranslated(error: BaseException | None) -> str | None:
    """The operator of kernops that the exporter has no translation for, if that is why it failed."""
    while error is not None:
        found = re.search(r"No ONNX function found for <OpOverload\(op='(kernops\.\w+)'", str(error))
        if found:
            return f"torch.ops.{found[1]}"
        error = error.__cause__
    return None


@lru_cache(maxsize=1)
def _translation() -> Callable[..., Any]:
    """What the exporter writes for ``torch.ops.kernops.bev_pool``: the bare node."""
    from onnx.defs import OpSchema
    from onnxscript import values

    optional = OpSchema.FormalParameterOption.Optional
    kinds = [
        ("T", [f"tensor({name})" for name in ("float16", "bfloat16", "float", "double")], "floating-point numbers"),
        ("I", ["tensor(int32)", "tensor(int64)"], "cells"),
    ]
    inputs = [OpSchema.FormalParameter(name, kind) for name, kind in (("depth", "T"), ("feat", "T"), ("cells", "I"))]
    schema = OpSchema(
        OP,
        DOMAIN,
        VERSION,
        doc="Sums of depth * feat (* weight) over the points of each cell.",
        inputs=[*inputs, OpSchema.FormalParameter("weight", "T", param_option=optional)],
        outputs=[OpSchema.FormalParameter("pooled", "T")],
        type_constraints=kinds,
        attributes=[
            OpSchema.Attribute("shape", OpSchema.AttrType.INTS),
            OpSchema.Attribute("depth_logits", OpSchema.AttrType.INT),
        ],
    )
    node = values.Op(values.Opset(DOMAIN, VERSION), OP, schema)

    def bev_pool(depth, feat, weight, cells, levels, shape, variant, backend, depth_logits):  # type: ignore[no-untyped-def]
        inputs = (depth, feat, cells) if weight is None else (depth, feat, cells, weight)
        return node(*inputs, shape=_static(shape), depth_logits=int(depth_logits))

    return bev_pool


def _static(shape: Sequence[Any]) -> list[int]:
    """The attribute ``shape``, with -1 for a dynamic number of samples."""
    batch, *grid = shape
    if not all(isinstance(size, int) for size in grid):
        raise ValueError(f"the grid (Z, Y, X) of a splat must be fixed in an ONNX model; got {tuple(map(str, grid))}")
    return [batch if isinstance(batch, int) else -1, *grid]
